"""`pelton refit`: other weights of the same model into an engine, without building it again."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "Write an engine with the weights of another checkpoint of the same shapes; plans and code stay."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", type=Path)
    parser.add_argument("checkpoint", type=Path, help="folder or .gguf file with the new weights")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="may be the engine itself")


def execute(arguments: argparse.Namespace) -> int:
    from ..builder.checkpoint import Checkpoint
    from ..runtime.format.refit import refit

    checkpoint = Checkpoint.open(arguments.checkpoint)
    provenance = {"checkpoint": checkpoint.name, "checkpoint_hash": checkpoint.fingerprint()}
    print(refit(arguments.engine, checkpoint.source, arguments.output, provenance=provenance))
    return 0
