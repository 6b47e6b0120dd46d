"""Both console scripts start here: `build-engine`, and `pelton` with its subcommands."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from .commands import bench, build_engine, inspect, profile, refit, run, sign, targets, verify
from .runtime.errors import PeltonError

COMMANDS = {
    "run": run,
    "bench": bench,
    "profile": profile,
    "inspect": inspect,
    "verify": verify,
    "targets": targets,
    "sign": sign,
    "refit": refit,
}


def main(argv: Sequence[str] | None = None) -> int:
    """`pelton COMMAND ...`; returns the exit status (0 good, 1 a problem found, 2 bad usage or input)."""
    from . import __version__

    parser = argparse.ArgumentParser(prog="pelton", allow_abbrev=False, description="Run, inspect and check engines.")
    parser.add_argument("--version", action="version", version=f"pelton {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False))
    arguments = parser.parse_args(_dashes(sys.argv[1:] if argv is None else argv))
    return _guarded(COMMANDS[arguments.command].execute, arguments)


def build_engine_main(argv: Sequence[str] | None = None) -> int:
    """`build-engine CHECKPOINT -o ENGINE ...`."""
    parser = argparse.ArgumentParser(prog="build-engine", allow_abbrev=False, description=build_engine.HELP)
    build_engine.add_arguments(parser)
    arguments = parser.parse_args(_dashes(sys.argv[1:] if argv is None else argv))
    return _guarded(build_engine.execute, arguments, "lower --max-num-tokens or --max-batch-size")


def _dashes(argv: Sequence[str]) -> list[str]:
    """Accept TensorRT-LLM's spelling of flags, with underscores (--max_batch_size); values are left alone."""
    result: list[str] = []
    for i, word in enumerate(argv):
        if word == "--":
            return result + list(argv[i:])
        name, equals, value = word.partition("=")
        result.append(name.replace("_", "-") + equals + value if word.startswith("--") else word)
    return result


def _guarded(
    execute: Callable[[argparse.Namespace], int],
    arguments: argparse.Namespace,
    remedy: str = "an engine built with a smaller --max-num-tokens or --max-batch-size needs less",
) -> int:
    """Run a command; a typed error becomes one clear message and status 2. ``remedy``: where memory runs out."""
    with contextlib.suppress(ValueError):  # outside the main thread signals are another's business
        signal.signal(signal.SIGTERM, _terminate)
    try:
        status = execute(arguments)
    except PeltonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"error: out of memory ({error}); {remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    return status


def _terminate(number: int, frame: FrameType | None) -> None:
    """A polite kill unwinds like an interrupt, so that temporary files go."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
