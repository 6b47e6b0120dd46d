"""From an engine file to the parts that serving needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..runtime.drivers.base import Driver
from ..runtime.errors import EngineFormatError
from .output import DetokenizerFactory

if TYPE_CHECKING:
    from ..runtime.format.container import EngineFile

Trust = Literal["any", "signed"]
VerifyWeights = Literal["background", "before", "off"]


class TextTokenizer(Protocol):
    """What serving needs of a tokenizer; ``runtime.text.tokenizer.Tokenizer`` is the real one."""

    @property
    def chat_template(self) -> object | None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]: ...


@dataclass
class EngineParts:
    """What ``LLM`` runs on. ``close`` gives back what was opened here."""

    driver: Driver
    tokenizer: TextTokenizer | None = None
    detokenizer: DetokenizerFactory | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: Mapping[str, float | int | bool] = field(default_factory=dict)
    opened: EngineFile | None = None

    def close(self) -> None:
        """Close the driver, and the engine file if it was opened for this."""
        self.driver.close()
        if self.opened is not None:
            self.opened.close()


def load_engine(
    engine: str | Path | EngineFile,
    *,
    threads: int | None,
    trust: Trust,
    verify_weights: VerifyWeights,
    public_key: str | Path | bytes | None,
) -> EngineParts:
    """Open an engine for this machine's best target. An ``EngineFile`` stays the caller's to close.

    Raises EngineFormatError, TrustError, TargetMismatchError, DriverError.
    """
    from ..runtime.format.container import EngineFile

    if isinstance(engine, EngineFile):
        return _parts(engine, threads)
    if Path(engine).is_dir():
        raise EngineFormatError(f"{engine} is a folder, not an engine file: build it first with build-engine {engine}")
    opened = EngineFile.open(engine, trust=trust, verify_weights=verify_weights, public_key=public_key)
    try:
        parts = _parts(opened, threads)
    except BaseException:
        opened.close()
        raise
    parts.opened = opened
    return parts


def _parts(engine: EngineFile, threads: int | None) -> EngineParts:
    from ..runtime.drivers.cpu.driver import CpuDriver
    from ..runtime.drivers.cpu.host import select_target
    from ..runtime.text.detokenizer import IncrementalDetokenizer
    from ..runtime.text.tokenizer import Tokenizer

    model = engine.manifest.model
    tokenizer = Tokenizer.from_section(engine.section("tokenizer")) if engine.has_section("tokenizer") else None
    driver = CpuDriver(engine, select_target(engine.manifest.targets), threads=threads)
    parts = EngineParts(driver, eos_token_ids=model.eos_token_ids, generation_defaults=model.generation_defaults)
    if tokenizer is not None:
        parts.tokenizer = tokenizer
        parts.detokenizer = lambda skip_special_tokens: IncrementalDetokenizer(tokenizer, skip_special_tokens)
    return parts
