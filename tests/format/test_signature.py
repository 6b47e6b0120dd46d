"""Signed engines: sign, verify, and every way a signature can be wrong."""

from __future__ import annotations

import builtins
import shutil
from pathlib import Path
from typing import Any

import pytest

from pelton.runtime.errors import EngineFormatError, TrustError
from pelton.runtime.format.container import EngineFile
from pelton.runtime.format.signature import sign, signature_path, verify_signature

from .engines import write

pytest.importorskip("cryptography", reason="needs the sign extra")
from cryptography.hazmat.primitives import serialization as pem
from cryptography.hazmat.primitives.asymmetric import ec, ed25519


def private_pem(key: Any, password: bytes | None = None) -> bytes:
    scheme = pem.BestAvailableEncryption(password) if password else pem.NoEncryption()
    return bytes(key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, scheme))


def public_pem(key: Any) -> bytes:
    return bytes(key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo))


KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.engine")


def test_signed_engine_opens(engine: Path, tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_bytes(private_pem(KEY))
    (tmp_path / "key.pub").write_bytes(public_pem(KEY))
    path = sign(engine, tmp_path / "key.pem")
    assert path == engine.with_name("tiny.engine.sig")
    with EngineFile.open(engine, trust="signed", public_key=tmp_path / "key.pub") as opened:
        assert verify_signature(engine, public_pem(KEY)) == opened.identity
    before = path.read_bytes()
    sign(engine, private_pem(KEY, b"secret"), b"secret")
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["key.pem", "key.pub", "tiny.engine", "tiny.engine.sig"]


def test_wrong_signatures(engine: Path, tmp_path: Path) -> None:
    public = public_pem(KEY)

    def refused(message: str, key: bytes | None = public) -> None:
        with pytest.raises(TrustError, match=message):
            EngineFile.open(engine, trust="signed", public_key=key)

    refused("no signature .*tiny.engine.sig")
    refused("needs the signer's public key", None)
    sig = sign(engine, private_pem(KEY))
    refused("was made with key [0-9a-f]{64}, and the key trusted is", public_pem(OTHER))
    refused("not an Ed25519 key", public_pem(ec.generate_private_key(ec.SECP256R1())))
    refused("public key cannot be read", b"nonsense")
    text = sig.read_text()
    line = text.splitlines()[3]
    for bad in ("ed25519 ", "ed25519 ????", line[:-10], line.replace(line[20], "A" if line[20] != "A" else "B", 1)):
        sig.write_text(text.replace(line, bad))
        refused("the signature is wrong")
    for content in (b"", b"\xff" * 10, b"hello"):
        sig.write_bytes(content)
        refused("is not a signature|cannot be read")
    sig.write_text(text)
    shutil.copy(write(tmp_path / "next.engine", pelton_version="2"), engine)
    refused("signature of another engine")


def test_forged_fields_do_not_help(engine: Path) -> None:
    """A signature by another key, relabelled as the trusted one."""
    sig = sign(engine, private_pem(OTHER))
    wrong = sig.read_text()
    right = sign(engine, private_pem(KEY)).read_text().splitlines()[2]
    sig.write_text(wrong.replace(wrong.splitlines()[2], right))
    with pytest.raises(TrustError, match="the signature is wrong"):
        verify_signature(engine, public_pem(KEY))


def test_damaged_engine_is_not_signed(engine: Path) -> None:
    data = bytearray(engine.read_bytes())
    data[-1] ^= 1
    engine.write_bytes(data)
    with pytest.raises(EngineFormatError, match="not signed, because weights are damaged"):
        sign(engine, private_pem(KEY))
    assert not signature_path(engine).exists()


def test_unusable_private_keys(engine: Path, tmp_path: Path) -> None:
    for key, message in (
        (b"nonsense", "cannot be read"),
        (private_pem(KEY, b"secret"), "its password"),
        (private_pem(ec.generate_private_key(ec.SECP256R1())), "not an Ed25519"),
        (tmp_path / "none.pem", "cannot read the key"),
    ):
        with pytest.raises(TrustError, match=message):
            sign(engine, key)


def test_without_cryptography_the_extra_is_named(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, key = builtins.__import__, private_pem(KEY)

    def absent(name: str, *arguments: Any, **named: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(TrustError, match=r"pip install 'pelton\[sign\]'"):
        sign(engine, key)
    with EngineFile.open(engine) as opened:
        assert opened.section("report") == b"{}"
