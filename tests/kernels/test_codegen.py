"""Compiling: every SKU, freestanding, the same bytes each time; the cache; errors that say what to do."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from pelton.builder.codegen.cache import ObjectCache, content_key
from pelton.builder.codegen.cpu import compile_cpu, compiler_version
from pelton.builder.codegen.elf import read_dynamic
from pelton.builder.kernels import KernelCall, KernelRegistry, NoKernelError
from pelton.builder.ops.base import Op
from pelton.builder.ops.fused import Gemm, PagedAttention, QKVRopeWrite
from pelton.builder.target import CPU_SKUS, Target
from pelton.plugins import KERNELS
from pelton.runtime.errors import BuildError
from pelton.runtime.format.dtypes import DType
from pelton.runtime.format.tensor_type import TOKEN_TYPE, TensorType

from .harness import BF16, F16, F32, RANGES, make_call

GOOD = 'extern "C" void {0}(const pelton_step *, void *const *args, pelton_worker *) {{ *(int *)args[0] = {1}; }}'
V3 = CPU_SKUS["x86-64-v3"]


def tiny_layer(dtype: DType) -> list[KernelCall]:
    qkv = TensorType(F32, ("T", 4 * 16))
    table = TensorType(F32, ("T", 8))
    return [
        make_call(
            Gemm(64, dtype, F32, prologue="rms_norm", eps=1e-5, activation="silu", gated=True),
            TensorType(F32, ("T", 32)), TensorType(dtype, (128, 32), "panel16"), TensorType(F32, (32,)),
        ),
        make_call(QKVRopeWrite("", 2, 1, 16, 16, False, False, 0.0, dtype, dtype), qkv, table, table, kv=True),
        make_call(
            PagedAttention("", 2, 1, 16, 0.25, None, None, dtype, dtype, dtype),
            TensorType(dtype, ("T", 2, 16)), TOKEN_TYPE, kv=True,
        ),
    ]  # fmt: skip


@pytest.mark.parametrize("sku", CPU_SKUS)
def test_every_sku_compiles_freestanding_and_reproducibly(sku: str, tmp_path: Path) -> None:
    target = Target("cpu", CPU_SKUS[sku])
    calls = tiny_layer(BF16)
    registry = KernelRegistry(KERNELS)
    sources = [(f"k{i}", registry.select(c, target).emit(c, target, f"k{i}")) for i, c in enumerate(calls)]
    first = compile_cpu(sources, CPU_SKUS[sku], cache=ObjectCache(tmp_path / "a"), jobs=1)
    info = read_dynamic(first)
    assert info.undefined == ()
    assert info.needed == ()
    assert info.defined == tuple(sorted([*(f"k{i}" for i in range(len(calls))), "pelton_abi"]))
    if sku == "x86-64-v4+vnni+bf16":
        assert compile_cpu(sources, CPU_SKUS[sku], cache=ObjectCache(tmp_path / "b"), jobs=2) == first


def test_selection_follows_the_dot_product() -> None:
    def name(sku: str, dtype: DType) -> str:
        return KernelRegistry(KERNELS).select(tiny_layer(dtype)[0], Target("cpu", CPU_SKUS[sku])).name

    assert name("x86-64-v3", BF16) == "cpu.gemm.avx2"
    assert name("x86-64-v4", BF16) == "cpu.gemm.avx512"
    assert name("x86-64-v4+vnni+bf16", BF16) == "cpu.gemm.avx512_bf16"
    assert name("x86-64-v4+vnni+bf16", F16) == "cpu.gemm.avx512"
    assert name("sapphirerapids", BF16) == "cpu.gemm.amx_bf16"
    assert name("sapphirerapids", F16) == "cpu.gemm.avx512"


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (PagedAttention("", 2, 1, 15, 0.25, None, None, F32, F32, F32), "head_dim 15 must be even"),
        (PagedAttention("", 2, 1, 16, 0.25, 0, None, F32, F32, F32), "window 0 is not positive"),
        (PagedAttention("", 2, 1, 16, 0.25, None, -1.0, F32, F32, F32), "softcap -1.0 is not positive"),
    ],
)
def test_refusals_are_precise(op: Op, reason: str) -> None:
    call = KernelCall(op, (), (), ("kv",), RANGES)
    with pytest.raises(NoKernelError, match=reason):
        KernelRegistry(KERNELS).select(call, Target("cpu", V3))


def test_refuses_other_targets() -> None:
    with pytest.raises(NoKernelError, match="not a CPU"):
        KernelRegistry(KERNELS).select(tiny_layer(F32)[0], Target("reference"))


def test_cache_hits_until_source_or_flags_change(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path)
    first = compile_cpu([("a", GOOD.format("a", 1))], V3, cache=cache)
    assert (cache.hits, cache.misses) == (0, 1)
    assert compile_cpu([("a", GOOD.format("a", 1))], V3, cache=cache) == first
    assert (cache.hits, cache.misses) == (1, 1)
    assert compile_cpu([("a", GOOD.format("a", 2))], V3, cache=cache) != first
    compile_cpu([("a", GOOD.format("a", 1))], CPU_SKUS["x86-64-v4"], cache=cache)
    assert (cache.hits, cache.misses) == (1, 3)


def test_damaged_cache_entry_is_rebuilt(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path)
    cache.put("ab" * 32, b"object")
    (entry,) = (p for p in tmp_path.rglob("*") if p.is_file())
    entry.write_bytes(entry.read_bytes()[:-1] + b"?")
    assert cache.get("ab" * 32) is None
    cache.put("ab" * 32, b"object")
    assert cache.get("ab" * 32) == b"object"


def test_unwritable_cache_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "objects").write_text("a file where a folder should be")
    with pytest.raises(BuildError, match="PELTON_CACHE"):
        ObjectCache(tmp_path).put("ab" * 32, b"object")


def test_content_key_separates_parts() -> None:
    assert content_key(["ab", "c"]) != content_key(["a", "bc"])


def test_compile_error_shows_the_compilers_words(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no_such_type"):
        compile_cpu([("a", "no_such_type x;")], V3, cache=ObjectCache(tmp_path))
    assert not any(tmp_path.rglob("*"))


def test_library_calls_are_refused(tmp_path: Path) -> None:
    source = 'extern "C" float sinf(float); ' + GOOD.format("a", "sinf(1.0f)")
    with pytest.raises(BuildError, match="sinf"):
        compile_cpu([("a", source)], V3, cache=ObjectCache(tmp_path))


def test_missing_symbol_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="lack b"):
        compile_cpu([("b", GOOD.format("a", 1))], V3, cache=ObjectCache(tmp_path))


def test_compiler_comes_from_cxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "my-cxx"
    fake.write_text("#!/bin/sh\necho my-cxx 99.9\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(fake))
    assert compiler_version() == "my-cxx 99.9"
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    with pytest.raises(BuildError, match="set CXX"):
        compiler_version()


def test_no_compiler_at_all_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BuildError, match="apt install"):
        compiler_version()


def test_elf_reader_refuses_rubbish() -> None:
    for data in (b"", b"\x7fELF\x02\x01" + b"\xff" * 80, b"MZ" * 100):
        with pytest.raises(BuildError, match="ELF64"):
            read_dynamic(data)
