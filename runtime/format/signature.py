"""Detached Ed25519 signatures of engines: ``OUT.engine.sig`` beside ``OUT.engine``.

What is signed is the engine's identity, the hash of its header, which holds the hashes of everything else. The
``cryptography`` package does the arithmetic; it is needed only to sign and to open with ``trust="signed"``.

A key pair: ``openssl genpkey -algorithm ed25519 -out key.pem`` and ``openssl pkey -in key.pem -pubout -out key.pub``.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import EngineFormatError, TrustError
from .engine_reader import EngineFile

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

Key = str | os.PathLike[str] | bytes  # PEM bytes, or the path of a PEM file

_FIRST_LINE = "pelton engine signature 1"
_MOST_BYTES = 4096  # of a signature file; a real one has about 250


def signature_path(engine: str | os.PathLike[str]) -> Path:
    """Where the signature of an engine lies."""
    return Path(f"{os.fspath(engine)}.sig")


def sign(engine: str | os.PathLike[str], private_key: Key, password: bytes | None = None) -> Path:
    """Check every byte of an engine, then sign it. Returns the signature's path.

    Raises EngineFormatError if the engine is damaged, TrustError if the key is unusable or the signature unwritable.
    """
    key = _private_key(private_key, password)
    with EngineFile.open(engine, verify_weights="off") as opened:
        problems = opened.check()
        identity = opened.identity
    if problems:
        raise EngineFormatError(f"{engine}: not signed, because {problems[0]}")
    text = "\n".join(
        (
            _FIRST_LINE,
            f"engine {identity}",
            f"key {_fingerprint(key.public_key())}",
            f"ed25519 {base64.b64encode(key.sign(_message(identity))).decode()}",
            "",
        )
    )
    path = signature_path(engine)
    _write(path, text)
    return path


def verify_signature(engine: str | os.PathLike[str], public_key: Key) -> str:
    """Check an engine's signature against its header; returns the engine's identity.

    Raises TrustError if the signature is missing or wrong, EngineFormatError if the header is damaged. Weights are
    not read here: ``EngineFile.check`` or ``verify_weights`` hold them against the signed header.
    """
    with EngineFile.open(engine, verify_weights="off") as opened:
        identity = opened.identity
    require_signature(Path(engine), identity, public_key)
    return identity


def require_signature(engine: Path, identity: str, public_key: Key | None) -> None:
    """Raise TrustError unless ``engine`` has a signature of ``identity`` by this key."""
    if public_key is None:
        raise TrustError(
            f"{engine}: trust 'signed' needs the signer's public key (a PEM file); give it, or trust 'any'"
        )
    key = _public_key(public_key)
    path = signature_path(engine)
    fields = _read(path)
    if fields.get("engine") != identity:
        raise TrustError(
            f"{path} is the signature of another engine than {engine}; sign this one, or get its signature"
        )
    if fields.get("key") != _fingerprint(key):
        raise TrustError(
            f"{path} was made with key {fields.get('key', '?')[:64]}, and the key trusted is {_fingerprint(key)}; "
            "give the signer's public key, or have the engine signed again"
        )
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(base64.b64decode(fields.get("ed25519", ""), validate=True), _message(identity))
    except (InvalidSignature, ValueError):
        raise TrustError(f"{path}: the signature is wrong; do not use {engine}") from None


def _message(identity: str) -> bytes:
    """What is signed: never a bare hash, so that a signature cannot be taken for one of something else."""
    return f"{_FIRST_LINE}\n{identity}\n".encode()


def _read(path: Path) -> dict[str, str]:
    """The fields of a signature file."""
    try:
        with path.open("rb") as file:
            lines = file.read(_MOST_BYTES).decode("ascii").splitlines()
    except FileNotFoundError:
        raise TrustError(f"there is no signature {path}; sign the engine, or open it with trust 'any'") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TrustError(f"the signature {path} cannot be read: {error}") from error
    if not lines or lines[0] != _FIRST_LINE:
        raise TrustError(f"{path} is not a signature of a pelton engine")
    pairs = (line.partition(" ") for line in lines[1:])
    return {name: value for name, _, value in pairs}


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        try:
            temporary.write_text(text)
            os.replace(temporary, path)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
    except OSError as error:
        raise TrustError(f"cannot write the signature {path}: {error.strerror}") from error


def _fingerprint(key: Ed25519PublicKey) -> str:
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()


def _private_key(key: Key, password: bytes | None) -> Ed25519PrivateKey:
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        loaded = load_pem_private_key(_pem(key), password)
    except (ValueError, TypeError) as error:
        raise TrustError(
            f"the private key cannot be read (a PEM file, and its password if it has one): {error}"
        ) from None
    if not isinstance(loaded, Ed25519PrivateKey):
        raise TrustError("the private key is not an Ed25519 key; make one: openssl genpkey -algorithm ed25519")
    return loaded


def _public_key(key: Key) -> Ed25519PublicKey:
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        loaded = load_pem_public_key(_pem(key))
    except ValueError as error:
        raise TrustError(f"the public key cannot be read (a PEM file from openssl pkey -pubout): {error}") from None
    if not isinstance(loaded, Ed25519PublicKey):
        raise TrustError("the public key is not an Ed25519 key")
    return loaded


def _pem(key: Key) -> bytes:
    if isinstance(key, bytes):
        return key
    try:
        return Path(key).read_bytes()
    except OSError as error:
        raise TrustError(f"cannot read the key {os.fspath(key)}: {error.strerror}") from error


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise TrustError("signatures need the cryptography package: pip install 'pelton[sign]'") from None
