"""How many KV blocks to make when the caller does not say."""

from __future__ import annotations

from ..runtime.drivers.base import Driver
from ..runtime.errors import RequestError
from ..runtime.memory import available_memory
from .kv_cache import KVCache
from .scheduler import SchedulerConfig

#: Share of the memory that is free at start which the KV cache may grow to, weights already counted.
_MEMORY_SHARE = 0.5
#: So many tokens may be asked for even where the ranges can use fewer.
_LOOSE_KV_TOKENS = 1 << 20


def num_kv_blocks(
    driver: Driver,
    config: SchedulerConfig,
    *,
    max_kv_tokens: int | None = None,
    kv_cache_bytes: int | None = None,
    available_bytes: int | None = None,
) -> tuple[int, ...]:
    """Blocks of each KV group. ``config`` is resolved.

    ``max_kv_tokens``: tokens over all sequences; ``kv_cache_bytes``: memory; neither: what the engine's ranges can
    use, or half of ``available_bytes`` (default: what the machine or its container has free) where that is less,
    but at least one sequence of max_seq_len. Storage is touched only when it is used. Raises RequestError for a
    bad value.
    """
    if max_kv_tokens is not None and kv_cache_bytes is not None:
        raise RequestError("max_kv_tokens and kv_cache_bytes both give the size of the KV cache: give one of them")
    ranges = driver.plan.ranges
    block = ranges.tokens_per_block
    sizes = [driver.block_bytes(group) for group in range(len(driver.plan.kv_groups))]
    alone = _blocks(driver, config, ranges.max_seq_len)
    everything = tuple(config.max_batch_size * blocks for blocks in alone)
    for name, given in (("max_kv_tokens", max_kv_tokens), ("kv_cache_bytes", kv_cache_bytes)):
        if given is not None and (isinstance(given, bool) or not isinstance(given, int)):
            raise RequestError(f"{name}: got {given!r}; allowed: an integer")
    if max_kv_tokens is not None:
        if max_kv_tokens < block:
            raise RequestError(f"max_kv_tokens: got {max_kv_tokens}; allowed: at least one block of {block} tokens")
        most = max(everything, default=1) * block
        if max_kv_tokens > max(most, _LOOSE_KV_TOKENS):
            raise RequestError(
                f"max_kv_tokens: got {max_kv_tokens}; allowed: at most {max(most, _LOOSE_KV_TOKENS)}: "
                f"{config.max_batch_size} sequences of {ranges.max_seq_len} tokens, all that run at once, hold {most}"
            )
        return tuple(max_kv_tokens // block for _ in everything)
    asked = kv_cache_bytes
    if asked is None:
        asked = int((available_memory() if available_bytes is None else available_bytes) * _MEMORY_SHARE)
    fits = _fit(everything, sizes, asked)
    if kv_cache_bytes is not None and min(fits, default=1) < 1:
        raise RequestError(
            f"kv_cache_bytes: got {kv_cache_bytes}; allowed: at least {sum(sizes)}, one block of {block} tokens"
        )
    if kv_cache_bytes is not None:
        return fits
    return tuple(max(least, count) for least, count in zip(alone, fits, strict=True))


def _blocks(driver: Driver, config: SchedulerConfig, tokens: int) -> tuple[int, ...]:
    """Blocks that a sequence of ``tokens`` tokens holds at most at once."""
    groups = driver.plan.kv_groups
    cache = KVCache(groups, [0] * len(groups), 0, driver.plan.ranges, config.max_chunk_tokens)
    return cache.peak(tokens)


def _fit(everything: tuple[int, ...], sizes: list[int], budget: int) -> tuple[int, ...]:
    """``everything``, scaled down alike in all groups until its bytes fit the budget."""
    total = sum(blocks * size for blocks, size in zip(everything, sizes, strict=True))
    if total <= budget:
        return everything
    return tuple(blocks * budget // total for blocks in everything)
