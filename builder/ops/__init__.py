"""The op set. Importing this package registers every op by name (see base.OPS)."""

from . import elementwise, fused, generic
from .base import OPS, Op, StepContext, op_from_attributes

__all__ = ["OPS", "Op", "StepContext", "elementwise", "fused", "generic", "op_from_attributes"]
