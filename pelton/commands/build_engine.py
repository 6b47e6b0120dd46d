"""`build-engine`: from a checkpoint to an engine file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = "Build an engine file from a Hugging Face checkpoint folder or a GGUF file."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", nargs="?", help="checkpoint folder (config.json, *.safetensors) or .gguf file")
    parser.add_argument("--checkpoint-dir", help="the same, under TensorRT-LLM's name")
    parser.add_argument(
        "-o", "--output", "--output-dir", dest="output", required=True, metavar="FILE", help="the engine file to write"
    )
    parser.add_argument(
        "--target",
        action="append",
        metavar="SKU",
        help="what to compile for; repeat for several SKUs in one file (default: host; list: pelton targets)",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "float16", "bfloat16"],
        default="auto",
        help="type of weights and KV cache (default auto: the checkpoint's; bfloat16 for a quantised GGUF file)",
    )
    parser.add_argument(
        "--weight-packing",
        choices=["auto", "off"],
        default="auto",
        help="auto (default): bfloat16 matrices of products take 12 bits an element, no value changed; off: 16",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the Python code that comes with the checkpoint, where transformers lacks the architecture",
    )
    ranges = parser.add_argument_group("ranges the engine is specialised to")
    ranges.add_argument("--max-batch-size", type=int, metavar="N", help="sequences in one step (default 64)")
    ranges.add_argument(
        "--max-num-tokens", type=int, metavar="N", help="tokens in one step (default 2048, at least --max-batch-size)"
    )
    ranges.add_argument(
        "--max-seq-len", type=int, metavar="N", help="prompt and output of one sequence (default: the model's)"
    )
    ranges.add_argument(
        "--opt-num-tokens", type=int, metavar="N", help="tokens that tiles are tuned for (default: --max-batch-size)"
    )
    ranges.add_argument(
        "--max-logits-rows",
        type=int,
        metavar="N",
        help="rows with logits in one step (default 64, at least --max-batch-size)",
    )
    ranges.add_argument("--tokens-per-block", type=int, metavar="N", help="tokens in a KV block (default 32)")
    ranges.add_argument("--max-logprobs", type=int, metavar="N", help="top logprobs a request may ask for (default 20)")
    tools = parser.add_argument_group("compilation and checks")
    tools.add_argument("--compiler", metavar="CXX", help="C++ compiler (default: $CXX, g++, clang++)")
    tools.add_argument(
        "--cache-dir", type=Path, metavar="DIR", help="compiled objects (default $PELTON_CACHE, else ~/.cache/pelton)"
    )
    tools.add_argument("--jobs", type=int, metavar="N", help="compiler processes at once (default: one per core)")
    tools.add_argument(
        "--autotune",
        action="store_true",
        help="time tile shapes and blockings on this machine (default: a model of the SKU chooses; same results)",
    )
    tools.add_argument(
        "--timing-cache",
        type=Path,
        metavar="FILE",
        help="timings from earlier builds, here or elsewhere; with --autotune new ones are added",
    )
    tools.add_argument("--dump-ir", type=Path, metavar="DIR", help="write the graph after every pass")
    tools.add_argument("--verify", action="store_true", help="check every pass against the one before on real weights")
    tools.add_argument(
        "--no-golden",
        dest="golden",
        action="store_false",
        help="leave out the golden vectors that pelton verify checks",
    )
    tools.add_argument("-q", "--quiet", action="store_true", help="no progress, no summary")


#: Arguments handed to BuildOptions when given (None: the option's own default).
_OPTION_FIELDS = (
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
    "opt_num_tokens",
    "max_logits_rows",
    "tokens_per_block",
    "max_logprobs",
    "compiler",
    "cache_dir",
    "jobs",
    "timing_cache",
    "dump_ir",
)


def execute(arguments: argparse.Namespace) -> int:
    from ..runtime.errors import BuildError

    if (arguments.checkpoint is None) == (arguments.checkpoint_dir is None):
        raise BuildError("give the checkpoint once: build-engine CHECKPOINT -o FILE")
    try:
        from ..api import build  # fmt: skip
        from ..builder.progress import BuildProgress
    except ImportError as error:
        raise BuildError(f"build-engine needs the build extra: pip install 'pelton[build]' ({error})") from error

    given = {name: getattr(arguments, name) for name in _OPTION_FIELDS if getattr(arguments, name) is not None}
    result = build(
        arguments.checkpoint or arguments.checkpoint_dir,
        arguments.output,
        target=arguments.target or ["host"],
        dtype=arguments.dtype,
        weight_packing=arguments.weight_packing,
        verify=arguments.verify,
        golden=arguments.golden,
        trust_remote_code=arguments.trust_remote_code,
        autotune=arguments.autotune,
        progress=BuildProgress(quiet=arguments.quiet),
        **given,
    )
    if not arguments.quiet:
        print(
            f"{result.path}: {result.bytes / 1e6:.1f} MB for {', '.join(result.targets)} in {result.seconds:.1f} s",
            file=sys.stderr,
        )
        for note in result.notes:
            print(f"  note: {note}", file=sys.stderr)
    return 0
