"""The fused ops that kernels are written for. Numerics here are the contract of every target.

"compute" is the type to which a dot product's operands are rounded (f32, f16 or bf16); products
are accumulated in fp32. Everything between is fp32. Token count T may be any value from 1.
"""

from .attention import KVWrite, PagedAttention, QKVRopeWrite
from .gemm import Gemm
from .norm_rope import RMSNorm, Rope, RopeTable
from .tokens import Embedding, GatherRows, ResolveTokens, Sample

__all__ = [
    "Embedding",
    "GatherRows",
    "Gemm",
    "KVWrite",
    "PagedAttention",
    "QKVRopeWrite",
    "RMSNorm",
    "ResolveTokens",
    "Rope",
    "RopeTable",
    "Sample",
]
