"""`pelton sign`: a detached Ed25519 signature beside an engine, for those who serve with `--trust signed`."""

from __future__ import annotations

import argparse
import getpass
from pathlib import Path

HELP = "Check every byte of an engine and sign it (ENGINE.sig, Ed25519)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", type=Path, help="engine file")
    parser.add_argument("--key", type=Path, required=True, metavar="PEM", help="the private key, Ed25519 in PEM")
    parser.add_argument("--password", action="store_true", help="ask for the key's password")


def execute(arguments: argparse.Namespace) -> int:
    from ..runtime.format.signature import sign

    password = getpass.getpass("password of the key: ").encode() if arguments.password else None
    print(sign(arguments.engine, arguments.key, password))
    return 0
