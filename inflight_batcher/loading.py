"""From an engine file to the parts that serving needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..runtime.drivers.base import Driver
from ..runtime.errors import EngineFormatError
from .output import Detokenizer, DetokenizerFactory

if TYPE_CHECKING:
    from ..runtime.drivers.cpu.weights import WeightPlace
    from ..runtime.format.engine_reader import EngineFile, Trust, VerifyWeights
    from ..runtime.text.tokenizer import Tokenizer


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
    """What ``LLM`` runs on. ``close`` gives back what was opened here.

    A tokenizer takes longer to read than the first token to compute, so it may come as ``load_tokenizer``, which is
    called when a text is first met. ``moving_bytes``: memory that the driver is still going to take.
    """

    driver: Driver
    tokenizer: TextTokenizer | None = None
    detokenizer: DetokenizerFactory | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: Mapping[str, float | int | bool] = field(default_factory=dict)
    opened: EngineFile | None = None
    load_tokenizer: Callable[[], TextTokenizer] | None = None
    moving_bytes: int = 0

    def text(self) -> TextTokenizer | None:
        """The tokenizer, read now if it has not been; None if there is none."""
        if self.tokenizer is None and self.load_tokenizer is not None:
            self.tokenizer = self.load_tokenizer()
        return self.tokenizer

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
    weights: WeightPlace = "background",
) -> EngineParts:
    """Open an engine for this machine's best target. An ``EngineFile`` stays the caller's to close.

    Raises EngineFormatError, TrustError, TargetMismatchError, DriverError.
    """
    from ..runtime.format.engine_reader import EngineFile

    if isinstance(engine, EngineFile):
        # The caller may close it right after this.
        section = engine.section("tokenizer") if engine.has_section("tokenizer") else b""
        return _parts(engine, threads, weights, lambda: section)
    if Path(engine).is_dir():
        raise EngineFormatError(f"{engine} is a folder, not an engine file: build it first with build-engine {engine}")
    opened = EngineFile.open(engine, trust=trust, verify_weights=verify_weights, public_key=public_key)
    try:
        parts = _parts(opened, threads, weights, lambda: opened.section("tokenizer"))
    except BaseException:
        opened.close()
        raise
    parts.opened = opened
    return parts


def _parts(
    engine: EngineFile, threads: int | None, weights: WeightPlace, tokenizer_section: Callable[[], bytes]
) -> EngineParts:
    from ..runtime.drivers.cpu.driver import CpuDriver
    from ..runtime.drivers.cpu.host import select_target

    model = engine.manifest.model
    driver = CpuDriver(engine, select_target(engine.manifest.targets), threads=threads, weights=weights)
    parts = EngineParts(driver, eos_token_ids=model.eos_token_ids, generation_defaults=model.generation_defaults)
    parts.moving_bytes = driver.moving_bytes
    if engine.has_section("tokenizer"):
        _add_text(parts, tokenizer_section)
    return parts


def _add_text(parts: EngineParts, section: Callable[[], bytes]) -> None:
    """Tokenizer and detokenizers, both made when they are first used."""

    def load() -> Tokenizer:
        from ..runtime.text.tokenizer import Tokenizer

        return Tokenizer.from_section(section())

    def detokenizer(skip_special_tokens: bool) -> Detokenizer:
        from ..runtime.text.detokenizer import IncrementalDetokenizer

        # ``load`` made it: these parts were given no tokenizer.
        return IncrementalDetokenizer(cast("Tokenizer", parts.text()), skip_special_tokens)

    parts.load_tokenizer = load
    parts.detokenizer = lambda skip_special_tokens: LateDetokenizer(lambda: detokenizer(skip_special_tokens))


class LateDetokenizer:
    """A detokenizer that is made when the first token comes."""

    def __init__(self, make: Callable[[], Detokenizer]) -> None:
        self._make = make
        self._made: Detokenizer | None = None

    def push(self, token_id: int) -> str:
        if self._made is None:
            self._made = self._make()
        return self._made.push(token_id)

    def flush(self) -> str:
        return "" if self._made is None else self._made.flush()
