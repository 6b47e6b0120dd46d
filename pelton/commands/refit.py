"""`pelton refit`: other weights of the same model into an engine, without building it again."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "Write an engine with the weights of another checkpoint of the same shapes; plans and code stay."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", type=Path, help="engine file")
    parser.add_argument("checkpoint", type=Path, help="folder or .gguf file with the new weights")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="the engine file to write; may be the engine itself",
    )


def execute(arguments: argparse.Namespace) -> int:
    from ..builder.checkpoint import Checkpoint
    from ..runtime.errors import BuildError
    from ..runtime.format.refit import refit

    try:
        # A refit reads tensors only: code that comes with the checkpoint does not run.
        checkpoint = Checkpoint.open(arguments.checkpoint, trust_remote_code=True)
    except ImportError as error:  # a GGUF file is read by the gguf package
        raise BuildError(f"a GGUF file needs the build extra: pip install 'pelton[build]' ({error})") from error
    provenance = {"checkpoint": checkpoint.name, "checkpoint_hash": checkpoint.fingerprint()}
    print(refit(arguments.engine, checkpoint.source, arguments.output, provenance=provenance))
    return 0
