"""How a GEMM on a CPU is blocked. Results never depend on it; timings do."""

from __future__ import annotations

from dataclasses import dataclass

from pelton.runtime.format.dtypes import DType

_LINE = 64  # bytes that 16 outputs take in one step of a dot product on vectors, whatever the type
_TILE = 1024  # bytes of a full tile: 16 outputs, 32 values of k in bf16
TILE_DEPTH = 32  # values of k in one step on tiles


@dataclass(frozen=True)
class GemmTactic:
    """How a GEMM over many rows is blocked (fewer rows than a tile's stream the panels); results do not depend on it.

    ``tile_rows`` x ``tile_panels`` vectors of 16 outputs are accumulated in registers. The panels of a tile stay in
    the L2 cache for ``super_rows`` rows, ``block_steps`` steps of the dot product at a time.
    """

    tile_rows: int
    tile_panels: int
    super_rows: int
    block_steps: int

    @staticmethod
    def choose(k: int, compute: DType, vector_bits: int) -> GemmTactic:
        """Registers: 32 of 512 bits hold 8 x 2 sums beside their operands, 16 of 256 bits (two to a vector) 6 x 1.

        L2 (1 MiB with AVX-512, 512 KiB on older cores): three quarters hold the panels in use and those read ahead.
        Rows: 256 of them are few enough for the L3 share of a core, and many enough for each read of a panel.
        """
        rows, panels, l2 = (8, 2, 1 << 20) if vector_bits >= 512 else (6, 1, 512 << 10)
        steps = -(-k * compute.itemsize // 4)
        return GemmTactic(rows, panels, 256, _even_blocks(steps, l2 * 3 // 4 // (2 * panels * _LINE)))


@dataclass(frozen=True)
class AmxTactic:
    """The same on tiles: ``tile_rows`` / 16 x ``tile_panels`` tiles of sums, 32 values of k in a step.

    The sums, a tile of rows for each 16 rows and one of each panel must fit the eight registers.
    """

    tile_rows: int
    tile_panels: int
    super_rows: int
    block_steps: int

    @staticmethod
    def choose(k: int) -> AmxTactic:
        """2 x 2 tiles of sums: each tile that is loaded serves twice. (By the model alone: never timed.)

        A step then loads 4 KiB in 64 cycles, more than L2 gives: blocks of k are such that their panels, 32 KiB, stay
        in the L1 cache (48 KiB) for all ``super_rows`` rows, and only the rows come from L2.
        """
        rows, panels, l1 = 32, 2, 32 << 10
        steps = -(-k // TILE_DEPTH)
        return AmxTactic(rows, panels, 256, _even_blocks(steps, l1 // (panels * _TILE)))


def _even_blocks(steps: int, most: int) -> int:
    """The size of blocks of about equal size, none larger than ``most``."""
    return -(-steps // -(-steps // most))
