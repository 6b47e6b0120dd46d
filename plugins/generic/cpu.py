"""Generic CPU kernels: a pattern that no pass recognises still runs, slower, and the build report names it."""

from __future__ import annotations

from pelton.builder.kernels import Kernel

from . import elementwise, products, views

KERNELS: tuple[Kernel, ...] = (*elementwise.KERNELS, *views.KERNELS, *products.KERNELS)
