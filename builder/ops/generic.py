"""Shape, gather, reduction and product ops that a traced model may contain before (or without) fusion."""

from .attention import Attention
from .products import Linear, MatMul, Reduce, Softmax
from .views import Concat, Expand, Gather, Reshape, Slice, Transpose

__all__ = [
    "Attention",
    "Concat",
    "Expand",
    "Gather",
    "Linear",
    "MatMul",
    "Reduce",
    "Reshape",
    "Slice",
    "Softmax",
    "Transpose",
]
