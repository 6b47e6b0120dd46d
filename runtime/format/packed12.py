"""Layout packed12: a bf16 weight matrix in about 12 bits per element, every bit of every value kept.

The high byte of a bf16 value (sign, and all of the exponent but its last bit) takes few values in a trained weight.
A panel of 32 outputs keeps its 16 most frequent high bytes in a table and stores a 4-bit index instead of the byte;
low bytes are stored as they are, and the rare other high bytes in a list of exceptions. docs/engine_format.md has
the picture; this file is its reference. All multi-byte numbers are little endian.

    panel = head[64] + exceptions of half 0 [4 * capacity] + of half 1 + K/8 blocks[384]

Half 0 is outputs 0..15 of the panel, half 1 outputs 16..31. The matrix [N, K] is padded to whole panels with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import BuildError, LayoutOverflow
from .dtypes import DType

Array = np.ndarray[Any, Any]

PANEL_ROWS = 32
TABLE = 16  # entries of a panel's table, at the start of its head; the rest of the head is zero
HEAD = 64  # bytes
BLOCK_K = 8
BLOCK = 384  # bytes: for each half 128 low bytes and 64 bytes of two indices each
MAX_K = 1 << 20  # not reached: the block of an exception has 17 bits, and all ones stands for "unused"
UNUSED = 0xFFFFFFFF

_ABSENT = 128  # what _codes gives for a high byte that is not in the table
#: Panels are worked on in groups of about this many elements: their temporaries (8 bytes an element) fit the L2 cache.
_GROUP = 1 << 17


def exception_capacity(k: int) -> int:
    """Entries in a half's list of exceptions; at least one of them stays unused."""
    return 16 * -(-(k // 32 + 1) // 16)


def panel_bytes(k: int) -> int:
    """Bytes of a panel of depth ``k``; a multiple of 64."""
    return HEAD + 8 * exception_capacity(k) + k // BLOCK_K * BLOCK


def pack_packed12(array: Array) -> Array:
    """The storage array, bf16 [ceil(N/32), panel_bytes(K) // 2], of a bf16 matrix [N, K] whose K the layout takes.

    Raises LayoutOverflow if a half of a panel has more exceptions than its list has room for.
    """
    n, k = array.shape
    out = np.empty((-(-n // PANEL_ROWS), panel_bytes(k)), np.uint8)
    for start, stop, rows in _groups(array):
        _pack_group(rows, out[start:stop])
    return out.view(array.dtype)


def unpack_packed12(storage: Array, n: int, k: int) -> Array:
    """The bf16 matrix [n, k] of a storage array of the right size (``panels.unpack`` checks it).

    Raises BuildError for an exception that lies outside the matrix.
    """
    panels = np.ascontiguousarray(storage).view(np.uint8).reshape(-(-n // PANEL_ROWS), panel_bytes(k))
    out = np.empty((len(panels) * PANEL_ROWS, k), np.uint16)
    step = _group_panels(k)
    for start in range(0, len(panels), step):
        stop = min(start + step, len(panels))
        _unpack_group(panels[start:stop], out[start * PANEL_ROWS : stop * PANEL_ROWS])
    return out[:n].view(DType.BF16.numpy)


def fits_packed12(rows: Array) -> bool:
    """Whether ``pack_packed12`` takes these rows: bf16 [n, K] of whole panels (only a matrix's last may be short)."""
    room = exception_capacity(rows.shape[1]) - 1
    for start, stop, group in _groups(rows):
        index = np.empty((2 * (stop - start), PANEL_ROWS // 2 * group.shape[1]), np.int64)
        np.add((group >> 8).astype(np.uint8).reshape(index.shape), _half_bases(stop - start), out=index)
        counts = _half_counts(index, stop - start)
        if _exceptions_per_half(counts, _members(_tables(counts))).max() > room:
            return False
    return True


def _groups(array: Array) -> Iterator[tuple[int, int, Array]]:
    """(first panel, end, their rows as contiguous uint16 [32 * panels, K], padded with zeros), a group at a time."""
    n, k = array.shape
    step = _group_panels(k)
    panels = -(-n // PANEL_ROWS)
    for start in range(0, panels, step):
        stop = min(start + step, panels)
        rows = np.ascontiguousarray(array[start * PANEL_ROWS : stop * PANEL_ROWS]).view(np.uint16)
        missing = (stop - start) * PANEL_ROWS - len(rows)
        yield start, stop, np.pad(rows, ((0, missing), (0, 0))) if missing else rows


def _group_panels(k: int) -> int:
    return max(1, _GROUP // (PANEL_ROWS * k))


# --- tables -------------------------------------------------------------------------------------------------------


def _half_bases(panels: int) -> Array:
    """[2 * panels, 1]: what to add to a high byte so that every half counts for itself."""
    return 256 * np.arange(2 * panels)[:, None]


def _half_counts(index: Array, panels: int) -> Array:
    """[panels, 2, 256]: how often each half has each high byte, from 256 * half + high byte of every element."""
    return np.bincount(index.reshape(-1), minlength=512 * panels).reshape(panels, 2, 256)


def _tables(counts: Array) -> Array:
    """[panels, 16] uint8: the most frequent high bytes (of equally frequent ones the lower), ascending; the last
    is repeated if there are fewer than 16."""
    # One number orders by frequency, then by the lower byte; no two are equal.
    keys = counts.sum(axis=1) * 256 + (255 - np.arange(256))
    keys = np.partition(keys, 256 - TABLE, axis=1)[:, 256 - TABLE :]
    values = 255 - keys % 256
    present = keys >= 256
    last = np.where(present, values, 0).max(axis=1, keepdims=True)
    return np.sort(np.where(present, values, last).astype(np.uint8), axis=1)


def _members(tables: Array) -> Array:
    """[panels, 256] bool: which high bytes are in the table."""
    members = np.zeros((len(tables), 256), np.bool_)
    np.put_along_axis(members, tables.astype(np.int64), True, axis=1)
    return members


def _codes(members: Array) -> Array:
    """[panels, 256] uint8: the (lowest) index of each high byte in the ascending table, _ABSENT if it is not there."""
    return np.where(members, np.cumsum(members, axis=1, dtype=np.uint8) - np.uint8(1), np.uint8(_ABSENT))


def _exceptions_per_half(counts: Array, members: Array) -> Array:
    """[panels, 2]: elements whose high byte is not in the table."""
    numbers: Array = np.where(members[:, None], 0, counts).sum(axis=2)
    return numbers


# --- panels -------------------------------------------------------------------------------------------------------
#
# A row of a block is four words of 32 bits, each a pair of neighbours in K. In a block's half they go by
# [words 0, 1 or words 2, 3][four columns each][word of the two][column of the four], which makes places 0..127 of
# the half: 0..63 are low0 and the low nibbles, 64..127 are low1 and the high nibbles.


def _words(rows: Array, panels: int) -> Array:
    """A view of rows' 32-bit words in the order of the storage: [panels, K/8, 2, 2, 4, 2, 4]."""
    return rows.view(np.uint32).reshape(panels, 2, 4, 4, -1, 2, 2).transpose(0, 4, 1, 5, 2, 6, 3)


def _parts(panels: Array, k: int) -> tuple[Array, Array, Array]:
    """Views of panels [p, panel_bytes]: exceptions uint32 [p, 2, capacity], low bytes and indices [p, K/8, 2, ...]."""
    count, capacity = len(panels), exception_capacity(k)
    blocks_at = HEAD + 8 * capacity
    exceptions = panels[:, HEAD:blocks_at].view("<u4").reshape(count, 2, capacity)
    blocks = panels[:, blocks_at:].reshape(count, k // BLOCK_K, 2, BLOCK // 2)
    return exceptions, blocks[..., :128], blocks[..., 128:]


def _pack_group(rows: Array, out: Array) -> None:
    """Rows uint16 [32 * panels, K] into panels uint8 [panels, panel_bytes]."""
    panels, k = len(out), rows.shape[1]
    exceptions, lows, indices = _parts(out, k)
    places = np.ascontiguousarray(_words(rows, panels)).view(np.uint16).reshape(lows.shape)
    highs = (places >> 8).astype(np.uint8)

    index = np.empty(places.shape, np.int64)
    np.add(highs, _half_bases(panels).reshape(panels, 1, 2, 1), out=index)
    counts = _half_counts(index, panels)
    tables = _tables(counts)
    members = _members(tables)
    numbers = _exceptions_per_half(counts, members)
    room = exceptions.shape[2] - 1
    if numbers.max() > room:
        raise LayoutOverflow(
            f"16 outputs of depth {k} have {numbers.max()} values outside the 16 most frequent high bytes, and layout"
            f" packed12 has room for {room}"
        )
    codes = np.repeat(_codes(members), 2, axis=0).reshape(-1)[index]

    out[:, :TABLE] = tables
    out[:, TABLE:HEAD] = 0
    exceptions[...] = UNUSED
    if numbers.any():
        _pack_exceptions(codes, highs, numbers, exceptions)
    np.copyto(lows, places, casting="unsafe")  # keeps the low byte
    nibbles = codes.reshape(panels, -1, 2, 2, 64)
    np.bitwise_or(nibbles[..., 0, :], nibbles[..., 1, :] << 4, out=indices)


def _pack_exceptions(codes: Array, highs: Array, numbers: Array, exceptions: Array) -> None:
    """List the elements whose code is _ABSENT, ``numbers`` [panels, 2] of them, and make their code 0."""
    # Ten times as fast as np.nonzero of four axes.
    panel, block, half, place = np.unravel_index(np.flatnonzero(codes == _ABSENT), codes.shape)
    entries = block << 15 | place << 8 | highs[panel, block, half, place]
    codes[panel, block, half, place] = 0
    # In order of halves and of entries, an entry's slot is its rank in its half.
    order = np.lexsort((entries, half, panel))
    starts = np.cumsum(numbers).reshape(numbers.shape) - numbers
    panel, half = panel[order], half[order]
    exceptions[panel, half, np.arange(len(order)) - starts[panel, half]] = entries[order]


def _unpack_group(panels: Array, out: Array) -> None:
    """Panels uint8 [p, panel_bytes] into rows uint16 [32 * p, K]."""
    count, k = len(panels), out.shape[1]
    exceptions, lows, indices = _parts(panels, k)
    codes = np.empty((count, k // BLOCK_K, 2, 2, 64), np.uint8)
    np.bitwise_and(indices, 15, out=codes[..., 0, :])
    np.right_shift(indices, 4, out=codes[..., 1, :])
    index = codes.reshape(count, -1) + TABLE * np.arange(count)[:, None]
    places = (panels[:, :TABLE].astype(np.uint16).reshape(-1) << 8)[index].reshape(lows.shape)
    places |= lows

    panel, half, slot = np.nonzero(exceptions != UNUSED)
    entries = exceptions[panel, half, slot].astype(np.int64)
    block, place = entries >> 15, entries >> 8 & 127
    if (block >= k // BLOCK_K).any():
        raise BuildError(f"a packed12 weight of depth {k} has an exception in block {block.max()}; it is damaged")
    places[panel, block, half, place] = places[panel, block, half, place] & 0xFF | (entries & 0xFF) << 8
    _words(out, count)[...] = places.view(np.uint32).reshape(count, -1, 2, 2, 4, 2, 4)
