"""Text from tokens while they arrive."""

from __future__ import annotations

from .tokenizer import Tokenizer


class IncrementalDetokenizer:
    """One sequence's tokens in, its text out, piece by piece.

    The pieces of all :meth:`push` calls and of one final :meth:`flush` are together exactly ``tokenizer.decode(ids)``.
    What a later token may still change is kept back: the first bytes of a character, a run of byte tokens, a space
    that may be tidied away. The cost of a push does not grow with the sequence.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = tokenizer.stream_plan.stream()
        # A decoder that cannot be streamed gives all its text at the end.
        self._kept: list[int] | None = None if tokenizer.stream_plan.exact else []

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that is now final. Raises RequestError on an impossible id."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None or (self._skip and self._tokenizer.is_special(token)):
            return ""
        if self._kept is not None:
            self._kept.append(token_id)
            return ""
        return self._stream.push(token)

    def flush(self) -> str:
        """Ends the sequence; returns the text that was kept back, an incomplete character as U+FFFD.

        The detokenizer is then as new.
        """
        if self._kept is not None:
            kept, self._kept = self._kept, []
            return self._tokenizer.decode(kept, skip_special_tokens=self._skip)
        rest = self._stream.finish()
        self._stream = self._tokenizer.stream_plan.stream()
        return rest
