"""Kernels of all targets. ``KERNELS`` lists every one, special before generic."""

from __future__ import annotations

from pelton.builder.kernels import Kernel

from .gemm import cpu as gemm_cpu
from .sampling import cpu as sampling_cpu

KERNELS: tuple[Kernel, ...] = (*gemm_cpu.KERNELS, *sampling_cpu.KERNELS)
