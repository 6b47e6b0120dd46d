"""Build options, and the ranges that follow from them. Impossible combinations are errors, never adjusted."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

from ..runtime.errors import BuildError
from ..runtime.format.dtypes import DType
from ..runtime.format.plan import Ranges

#: --dtype values; "auto" is the checkpoint's own type.
DTYPES = {"float32": DType.F32, "float16": DType.F16, "bfloat16": DType.BF16}

WEIGHT_PACKING = ("auto", "off")

_DEFAULT_NUM_TOKENS = 2048
_DEFAULT_BATCH_SIZE = 64
_LOGITS_CHUNK = 64  # rows: the head is read anew for each chunk, and each row of one takes a vocabulary of fp32
#: Most that a flag may say. Beyond these no machine has the memory, and sizes would leave 32 bits.
_MOST = {
    "max_batch_size": 1 << 14,
    "max_num_tokens": 1 << 20,
    "max_seq_len": 1 << 24,
    "opt_num_tokens": 1 << 20,
    "max_logits_rows": 1 << 20,
    "tokens_per_block": 1 << 10,
    "max_logprobs": 1 << 10,
    "jobs": 1 << 10,
}


@dataclass(frozen=True)
class BuildOptions:
    """What to build. None means "derive it": from the checkpoint, or from another option, as said beside each."""

    targets: tuple[str, ...] = ("host",)  # SKU names, "host", or "reference"
    dtype: str = "auto"
    max_batch_size: int = _DEFAULT_BATCH_SIZE
    max_num_tokens: int | None = None  # 2048, or max_batch_size if that is more
    max_seq_len: int | None = None  # the checkpoint's max_position_embeddings
    opt_num_tokens: int | None = None  # max_batch_size: the decode batch
    max_logits_rows: int | None = None  # max_batch_size, at least 64
    tokens_per_block: int = 32
    max_logprobs: int = 20
    compiler: str | None = None  # $CXX, then g++, then clang++
    cache_dir: Path | None = None  # ~/.cache/pelton
    jobs: int = 0  # compiler processes; 0 = one per available core
    autotune: bool = False  # time the kernels' tactics on this machine; results are the same bits either way
    timing_cache: Path | None = None  # a file of timings: read where it has them, and with autotune added to
    weight_packing: str = "auto"  # 12 bits an element where no value is lost and all targets read it; or "off"
    dump_ir: Path | None = None
    verify: bool = False  # differential check of every pass on the real weights
    golden: bool = True  # compute golden vectors for `pelton verify`
    trust_remote_code: bool = False  # run the model code that the checkpoint brings along (auto_map)

    def __post_init__(self) -> None:
        optional = {field.name for field in fields(self) if field.default is None}
        for name, most in _MOST.items():
            value: object = getattr(self, name)
            if value is None and name in optional:
                continue
            least = 0 if name == "jobs" else 1
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise BuildError(f"{flag(name)} must be an integer from {least} to {most}, not {value!r}")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise BuildError(f"--dtype {self.dtype!r} is not one of auto, {', '.join(DTYPES)}")
        if self.weight_packing not in WEIGHT_PACKING:
            known = ", ".join(WEIGHT_PACKING)
            raise BuildError(f"--weight-packing {self.weight_packing!r} is not one of {known}")
        if self.tokens_per_block % 16:
            raise BuildError(f"--tokens-per-block must be a multiple of 16, not {self.tokens_per_block}")

    @property
    def num_jobs(self) -> int:
        return self.jobs or len(os.sched_getaffinity(0))

    def precision(self, checkpoint_dtype: DType) -> DType:
        """The engine's GEMM and KV type."""
        return checkpoint_dtype if self.dtype == "auto" else DTYPES[self.dtype]

    def ranges(self, max_position_embeddings: int | None) -> Ranges:
        """The engine's ranges; raises BuildError where the options contradict each other or the model."""
        max_seq_len = self.max_seq_len or max_position_embeddings
        if max_seq_len is None:
            raise BuildError("the checkpoint's config has no max_position_embeddings; give --max-seq-len")
        if max_position_embeddings is not None and max_seq_len > max_position_embeddings:
            raise BuildError(
                f"--max-seq-len {max_seq_len} is over the model's longest sequence, {max_position_embeddings}; "
                f"give at most {max_position_embeddings}, or a checkpoint whose config has rope scaling for more"
            )
        max_num_tokens = self.max_num_tokens or max(_DEFAULT_NUM_TOKENS, self.max_batch_size)
        if max_num_tokens < self.max_batch_size:
            raise BuildError(
                f"--max-num-tokens {max_num_tokens} is under --max-batch-size {self.max_batch_size}: "
                "a decode step needs one token for each sequence; raise the former or lower the latter"
            )
        opt_num_tokens = self.opt_num_tokens or self.max_batch_size
        if opt_num_tokens > max_num_tokens:
            raise BuildError(f"--opt-num-tokens {opt_num_tokens} is over --max-num-tokens {max_num_tokens}")
        max_logits_rows = self.max_logits_rows or min(max_num_tokens, max(64, self.max_batch_size))
        if not self.max_batch_size <= max_logits_rows <= max_num_tokens:
            raise BuildError(
                f"--max-logits-rows {max_logits_rows} must lie between --max-batch-size {self.max_batch_size} "
                f"and --max-num-tokens {max_num_tokens}"
            )
        return Ranges(
            max_batch_size=self.max_batch_size,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            opt_num_tokens=opt_num_tokens,
            max_logits_rows=max_logits_rows,
            logits_chunk=min(_LOGITS_CHUNK, max_logits_rows),
            tokens_per_block=self.tokens_per_block,
            max_logprobs=self.max_logprobs,
        )


def flag(field_name: str) -> str:
    """The command-line spelling of an option field."""
    return "--" + field_name.replace("_", "-")
