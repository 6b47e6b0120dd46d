"""Numpy helpers of the reference meanings. Each treats rows independently, bit for bit.

A batched BLAS call may round a row differently when the number of rows changes. The reference is the
oracle of the batch-invariance contract, so it makes one call per row, always of the same shape.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

#: What a TOKEN value is in the reference: it carries no data.
TOKEN_ARRAY: NDArray[np.bool_] = np.zeros((), np.bool_)


def f32(x: np.ndarray) -> Floats:
    """x widened (or left) as fp32, contiguous."""
    return np.ascontiguousarray(x, dtype=np.float32)


def rounded(x: np.ndarray, dtype: np.dtype) -> Floats:
    """fp32 values rounded to ``dtype`` (to nearest even) and widened again."""
    values = f32(x)
    return values if dtype == np.float32 else values.astype(dtype).astype(np.float32)


_PART_ELEMENTS = 1 << 24


def rows_times(x: np.ndarray, weight: np.ndarray) -> Floats:
    """(x f32[...,K], weight f32[N,K]) -> f32[...,N]: x @ weight^T, one matrix-vector product per row."""
    outputs, inner = weight.shape
    rows = f32(x).reshape(-1, inner)
    out = np.empty((rows.shape[0], outputs), np.float32)
    # A part of the weight at a time, so that a large 16-bit matrix is never whole in fp32.
    part = max(1, _PART_ELEMENTS // max(inner, 1))
    for start in range(0, outputs, part):
        matrix = f32(weight[start : start + part])
        for index, row in enumerate(rows):
            out[index, start : start + part] = np.dot(matrix, row)
    return out.reshape(*x.shape[:-1], outputs)


def rms_normalised(x: np.ndarray, eps: float) -> Floats:
    """x [...,N] * rsqrt(mean(x^2) + eps), in fp32."""
    values = f32(x)
    mean = np.sum(values * values, axis=-1, keepdims=True, dtype=np.float32) / np.float32(values.shape[-1])
    return f32(values * (np.float32(1) / np.sqrt(mean + np.float32(eps))))


def softmax(x: np.ndarray, axis: int = -1) -> Floats:
    """Softmax along one axis in fp32; the reduced axis is made contiguous so that the sum's order is fixed."""
    values = np.ascontiguousarray(np.moveaxis(f32(x), axis, -1))
    e = np.exp(values - np.max(values, axis=-1, keepdims=True))
    return np.moveaxis(e / np.sum(e, axis=-1, keepdims=True, dtype=np.float32), -1, axis)


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, rotary_dim: int, interleaved: bool) -> Floats:
    """(x f32[T,H,D], cos and sin f32[T,R/2]) -> f32[T,H,D] with the first R = rotary_dim features rotated."""
    half = rotary_dim // 2
    out = np.array(x, dtype=np.float32)
    first = slice(0, rotary_dim, 2) if interleaved else slice(0, half)
    second = slice(1, rotary_dim, 2) if interleaved else slice(half, rotary_dim)
    a, b = out[..., first].copy(), out[..., second].copy()
    c, s = f32(cos)[:, None, :], f32(sin)[:, None, :]
    out[..., first] = a * c - b * s
    out[..., second] = b * c + a * s
    return out
