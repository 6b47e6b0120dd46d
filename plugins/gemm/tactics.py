"""How a GEMM on a CPU is blocked. Results never depend on it; timings do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from pelton.runtime.format.dtypes import DType

_LINE = 64  # bytes that 16 outputs take in one step of a dot product on vectors, whatever the type
TILE_DEPTH = 32  # values of k in one step on tiles
_AMX_STEPS = 56  # of those at most in one block; of more, _AMX_NEAR_STEPS to a block
_AMX_NEAR_STEPS = 8


@dataclass(frozen=True)
class GemmTactic:
    """How a GEMM over many rows is blocked; results do not depend on it.

    Up to ``tile_rows`` rows, and as many as a tile has sums, stream the panels instead (cpp/kernels/gemm.h).

    ``tile_rows`` x ``tile_panels`` vectors of 16 outputs are accumulated in registers. (Panels of a packed12 weight go
    by two: of an odd ``tile_panels`` one after another.) The panels of a tile stay in the L2 cache for ``super_rows``
    rows, ``block_steps`` steps of the dot product at a time.
    """

    tile_rows: int
    tile_panels: int
    super_rows: int
    block_steps: int

    @staticmethod
    def choose(k: int, compute: DType, vector_bits: int, *, widened: bool = False) -> GemmTactic:
        """Registers: 32 of 512 bits hold 8 x 2 sums beside their operands, 16 of 256 bits (two to a vector) 6 x 1.

        ``widened``: 16-bit types without a dot product of their own become two fp32 vectors, and each value of a row
        two broadcast ones. Beside these there is room for 4 x 4 or 4 x 1 sums; more are spilled to memory.
        L2 (1 MiB with AVX-512, 512 KiB on older cores): three quarters hold the panels in use and those read ahead.
        Rows: 256 of them are few enough for the L3 share of a core, and many enough for each read of a panel.
        """
        if vector_bits >= 512:
            rows, panels = (4, 4) if widened else (8, 2)
        else:
            rows, panels = (4, 1) if widened else (6, 1)
        return GemmTactic(rows, panels, 256, _block_steps(k, compute, vector_bits, panels))

    @staticmethod
    def candidates(
        k: int, compute: DType, vector_bits: int, most_rows: int, *, widened: bool = False
    ) -> tuple[GemmTactic, ...]:
        """The model's choice, then other tiles that fit the registers, fewer or more rows, and half of the steps.

        Super rows beyond the ``most_rows`` that there may be are no other tactic.
        """
        model = GemmTactic.choose(k, compute, vector_bits, widened=widened)
        tiles = ((8, 2), (12, 2), (6, 4), (4, 4)) if vector_bits >= 512 else ((6, 1), (5, 1), (4, 1), (3, 1))
        others = [GemmTactic(m, p, 256, _block_steps(k, compute, vector_bits, p)) for m, p in tiles]
        half = replace(model, block_steps=-(-model.block_steps // 2))
        return tuple(dict.fromkeys((model, *others, *_other_rows(model, most_rows), half)))


@dataclass(frozen=True)
class AmxTactic:
    """How a GEMM over many rows is blocked on tiles, always 2 x 2 of sums; results do not depend on it.

    ``super_rows`` pass by each pair of panels, ``block_steps`` steps of 32 values of k at a time; ``batch_pairs`` pairs
    go by one block of k before the next block.
    """

    super_rows: int
    block_steps: int
    batch_pairs: int

    @staticmethod
    def choose(k: int) -> AmxTactic:
        """L2 (2 MiB) holds all k of the rows in 1 MiB, beside two pairs of panels, where that much k goes in.

        Else sums wait there between blocks of k, and blocks may as well be so short that a pair of panels (16 KiB)
        stays in the first-level cache while the rows pass by.
        """
        steps = -(-k // TILE_DEPTH)
        rows = 512 if steps <= _AMX_STEPS // 2 else 256
        return AmxTactic(rows, steps if steps <= _AMX_STEPS else _even_blocks(steps, _AMX_NEAR_STEPS), 16)

    @staticmethod
    def candidates(k: int, most_rows: int) -> tuple[AmxTactic, ...]:
        """The model's choice, then fewer or more rows, half of the steps, and, of several blocks, half of the pairs."""
        model = AmxTactic.choose(k)
        others = [replace(model, block_steps=-(-model.block_steps // 2))]
        if model.block_steps * TILE_DEPTH < k:
            others.append(replace(model, batch_pairs=model.batch_pairs // 2))
        return tuple(dict.fromkeys((model, *_other_rows(model, most_rows), *others)))


AnyTactic = TypeVar("AnyTactic", GemmTactic, AmxTactic)


def _other_rows(model: AnyTactic, most_rows: int) -> list[AnyTactic]:
    """The same with half and with twice the super rows, where there may be so many rows."""
    rows = model.super_rows
    return [replace(model, super_rows=n) for n in (rows // 2, rows * 2) if min(n, rows) < most_rows]


def _block_steps(k: int, compute: DType, vector_bits: int, panels: int) -> int:
    """Steps of k in equal blocks, so that three quarters of L2 hold twice the panels of a tile."""
    l2 = 1 << 20 if vector_bits >= 512 else 512 << 10
    return _even_blocks(-(-k * compute.itemsize // 4), l2 * 3 // 4 // (2 * panels * _LINE))


def _even_blocks(steps: int, most: int) -> int:
    """The size of blocks of about equal size, none larger than ``most``."""
    return -(-steps // -(-steps // most))
