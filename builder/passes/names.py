"""Readable, deterministic names for weights that are made from several checkpoint tensors."""

from __future__ import annotations

from os.path import commonprefix


def module_name(weight: str) -> str:
    """The module that holds a parameter: "mlp.down_proj.weight" -> "mlp.down_proj"."""
    return weight.removesuffix(".weight").removesuffix(".bias")


def merged_name(weights: list[str]) -> str:
    """Name of q_proj, k_proj and v_proj merged: "...qkv_proj"; of gate_proj and up_proj: "...gate_up_proj"."""
    paths = [module_name(w).split(".") for w in weights]
    parent = list(commonprefix([p[:-1] for p in paths]))
    leaves = [".".join(p[len(parent) :]) for p in paths]
    ending = "_proj" if all(leaf.endswith("_proj") for leaf in leaves) else ""
    stems = [leaf.removesuffix(ending) for leaf in leaves]
    joined = ("" if all(len(stem) == 1 for stem in stems) else "_").join(stems) + ending
    return ".".join([*parent, joined])
