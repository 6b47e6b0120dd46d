"""Kernels of all targets. ``KERNELS`` lists every one, special before generic."""

from __future__ import annotations

from pelton.builder.kernels import Kernel

from .attention import cpu as attention_cpu
from .embedding import cpu as embedding_cpu
from .gemm import cpu as gemm_cpu
from .generic import cpu as generic_cpu
from .kv import cpu as kv_cpu
from .norm import cpu as norm_cpu
from .rope import cpu as rope_cpu
from .sampling import cpu as sampling_cpu

KERNELS: tuple[Kernel, ...] = (
    *embedding_cpu.KERNELS,
    *norm_cpu.KERNELS,
    *rope_cpu.KERNELS,
    *kv_cpu.KERNELS,
    *attention_cpu.KERNELS,
    *gemm_cpu.KERNELS,
    *sampling_cpu.KERNELS,
    *generic_cpu.KERNELS,
)
