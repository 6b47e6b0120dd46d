"""`pelton verify`: is this engine unaltered, and does it compute the right thing on this machine?"""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "Check an engine's hashes, tokenizer vectors and golden vectors on this machine."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", type=Path, help="engine file")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="size of the thread team (default: every CPU this process may use)"
    )
    parser.add_argument("--public-key", type=Path, metavar="PEM", help="also check the signature by this key")
    parser.add_argument("--hashes-only", action="store_true", help="do not run the engine (any machine)")


def execute(arguments: argparse.Namespace) -> int:
    from ..runtime.verify import verify_engine

    if arguments.public_key is not None:
        from ..runtime.format.signature import verify_signature

        print(f"ok   signature: of identity {verify_signature(arguments.engine, arguments.public_key)}")
    failed = False
    for check in verify_engine(arguments.engine, threads=arguments.threads, run=not arguments.hashes_only):
        failed |= bool(check.problems)
        print(f"{'FAIL' if check.problems else 'skip' if check.skipped else 'ok':<5}{check.name}: {check.detail}")
        for problem in check.problems:
            print(f"       {problem}")
    return 1 if failed else 0
