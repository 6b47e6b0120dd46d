"""The house rules that no other tool checks: import directions, file lengths, links, what serving pulls in."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("builder", "inflight_batcher", "plugins", "quantization", "runtime", "triton_backend")
#: runtime <- quantization <- builder <- plugins;  runtime <- inflight_batcher <- triton_backend
ALLOWED = {
    "runtime": {"_core"},
    "quantization": {"runtime"},
    "builder": {"runtime", "quantization"},
    "plugins": {"runtime", "quantization", "builder"},
    "inflight_batcher": {"runtime"},
    "triton_backend": {"runtime", "inflight_batcher"},
}
SERVING = ("runtime", "inflight_batcher", "triton_backend")
HEAVY = ("torch", "transformers", "gguf", "sentencepiece", "tiktoken")
MAX_LINES = 500


def sources(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> list[Path]:
    """Files of these folders (never through pelton/'s links)."""
    return sorted(p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in suffixes and not _linked(p))


def _linked(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, relative ones resolved as if the file lay under pelton/."""
    package = ["pelton", *path.relative_to(ROOT).parts[:-1]]
    if package[1:2] == ["pelton"]:
        package = package[1:]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                yield node.lineno, node.module or ""
                continue
            base = package[: len(package) - node.level + 1]
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from .. import name`: the name may be the package that matters.
            yield from ((node.lineno, module if node.module else f"{module}.{a.name}") for a in node.names)


def wrong_imports(path: Path) -> list[str]:
    """What a file of one of the six folders imports against the rules."""
    folder = path.relative_to(ROOT).parts[0]
    found = []
    for line, name in imports(path):
        parts = name.split(".")
        if parts[0] in FOLDERS:
            found.append(f"{path.relative_to(ROOT)}:{line}: top-level {name}; write pelton.{name}")
        elif parts[0] == "pelton" and (len(parts) == 1 or parts[1] not in {folder, *ALLOWED[folder]}):
            found.append(f"{path.relative_to(ROOT)}:{line}: {folder} may not import {name}")
        elif folder in SERVING and parts[0] in HEAVY:
            found.append(f"{path.relative_to(ROOT)}:{line}: the serving side may not import {name}")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_import_directions(folder: str) -> None:
    assert [w for path in sources(folder) for w in wrong_imports(path)] == []


def test_the_rule_finds_offences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    path = tmp_path / "runtime" / "format" / "bad.py"
    path.parent.mkdir(parents=True)
    lines = [
        "from ...builder.graph import Graph",
        "from ... import plugins",
        "import builder",
        "import torch.nn",
        "from .. import step",
    ]
    path.write_text("\n".join(lines))
    assert [w.split(": ")[1] for w in wrong_imports(path)] == [
        "runtime may not import pelton.builder.graph",
        "runtime may not import pelton.plugins",
        "top-level builder; write pelton.builder",
        "the serving side may not import torch.nn",
    ]


def test_tests_and_scripts_import_pelton_only() -> None:
    """`import builder` works from the root and gives a second copy of every class."""
    scripts = [p for p in sorted((ROOT / "scripts").iterdir()) if p.is_file() and "python" in p.open().readline()]
    offences = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in (*sources("tests"), *scripts)
        for line, name in imports(path)
        if name.split(".")[0] in FOLDERS
    ]
    assert offences == []


def test_file_lengths() -> None:
    """A file that does not fit in a head is two files."""
    python = sources(*FOLDERS, "pelton", "tests")
    native = sources("cpp", suffixes=(".h", ".cpp"))
    long = {str(p.relative_to(ROOT)): n for p in (*python, *native) if (n := p.read_text().count("\n")) > MAX_LINES}
    assert long == {}


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_for_type_checkers(folder: str) -> None:
    link = ROOT / "pelton" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder
    assert (link / "__init__.py").is_file()


def test_every_folder_of_python_is_a_package() -> None:
    missing = {str(p.parent.relative_to(ROOT)) for p in sources(*FOLDERS) if not (p.parent / "__init__.py").exists()}
    assert missing == set()


@pytest.mark.parametrize(
    "module",
    ["pelton.runtime", "pelton.inflight_batcher", "pelton.runtime.drivers.cpu.driver", "pelton.triton_backend"],
)
def test_serving_pulls_in_nothing_heavy(module: str) -> None:
    """In a fresh process: no torch, no transformers, no builder."""
    script = f"import sys, {module}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert module in loaded
    heavy = (*HEAVY, "pelton.builder", "pelton.plugins", "pelton.quantization")
    assert [m for m in loaded if m.startswith(tuple(f"{h}." for h in heavy)) or m in heavy] == []
