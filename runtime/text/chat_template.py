"""Chat templates: a conversation to the text of a prompt, as transformers renders it, in a sandbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from ..errors import RequestError, TokenizerError
from .limits import Budget, Limits, spending
from .sandbox import ChatEnvironment, TemplateRefusal

MAX_SOURCE = 1 << 20  # characters
_TEMPLATE_FILE = "<template>"  # Jinja's name for a template without a file, in tracebacks
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # the same as in transformers, should a template transform it
# Names under which a message may carry its reasoning; templates read the first, gpt-oss kinds the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled template, or a model's set of named ones. Safe to share between threads."""

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        clock: Callable[[], datetime] = datetime.now,
        limits: Limits | None = None,
    ) -> None:
        """Compiles ``source``: Jinja text, or name -> text with a name ``default`` (and ``tool_use``).

        ``special_tokens``: variables of the template (``bos_token``, ...). ``clock``: what ``strftime_now`` shows.

        Raises:
            TokenizerError: the template does not compile; names the line.
        """
        sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special_tokens = dict(special_tokens or {})
        self._limits = limits or Limits()
        environment = ChatEnvironment(lambda pattern: clock().strftime(pattern))
        self._templates = {name: _compile(environment, name, text) for name, text in sources.items()}
        self.sources: Mapping[str, str] = sources

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation.

        ``messages``, ``tools``, ``documents``: JSON-like data. ``continue_final_message`` ends the text inside the last
        message, to be continued by the model. ``kwargs``: further variables of the template (``enable_thinking``, ...).

        Raises:
            RequestError: the template refuses the conversation (``raise_exception``), fails on it, or exceeds a limit.
            TokenizerError: the template tries to reach what the sandbox forbids.
        """
        chat = _messages(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt exclude each other; set one of them"
                )
            chat[-1] = _marked(chat[-1])
        variables = {**self._special_tokens, **_plain(kwargs, "chat_template_kwargs")}
        variables.update(
            messages=chat,
            tools=_plain(tools, "tools"),
            documents=_plain(documents, "documents"),
            add_generation_prompt=add_generation_prompt,
        )
        text = self._run(self._choose(tools is not None), variables)
        return _cut(text) if continue_final_message else text

    def _choose(self, with_tools: bool) -> jinja2.Template:
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise RequestError(f"the model has chat templates {sorted(self._templates)} but none named 'default'")
        return template

    def _run(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        try:
            with spending(Budget(self._limits, variables)):
                return template.render(variables)
        except TemplateRefusal as error:
            raise RequestError(f"the chat template refuses this conversation: {error}") from error
        except SecurityError as error:
            raise TokenizerError(
                f"chat template, line {_line(error)}: {error}; the template tries to leave its sandbox, do not use it"
            ) from error
        except (Exception, MemoryError) as error:
            raise RequestError(
                f"the chat template fails on this conversation, line {_line(error)}: {type(error).__name__}: {error}; "
                "check roles, contents and tool calls against what the model's template expects"
            ) from error


def _compile(environment: ChatEnvironment, name: str, source: str) -> jinja2.Template:
    if len(source) > MAX_SOURCE:
        raise TokenizerError(f"chat template {name!r} has {len(source)} characters; {MAX_SOURCE} is the most")
    try:
        return environment.fenced(source)
    except jinja2.TemplateSyntaxError as error:
        lines = source.splitlines()
        shown = lines[error.lineno - 1].strip()[:120] if 0 < error.lineno <= len(lines) else ""
        raise TokenizerError(f"chat template {name!r}, line {error.lineno}: {error.message}: {shown!r}") from error
    except (Exception, RecursionError) as error:
        raise TokenizerError(f"chat template {name!r} does not compile: {type(error).__name__}: {error}") from error


def _line(error: BaseException) -> int | str:
    """The template line that an error came from; Jinja puts it in the traceback."""
    line: int | str = "unknown"
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _TEMPLATE_FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A fresh copy as plain data; a key without a value is as good as absent, and reasoning has all its names."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages must be a list of at least one message")
    chat = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{index}] is {type(message).__name__}; a message is an object with a role")
        plain = _plain(message, f"messages[{index}]")
        plain = {key: value for key, value in plain.items() if value is not None}
        reasoning = next((plain[name] for name in _REASONING if name in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        chat.append(plain)
    return chat


def _plain(value: Any, where: str) -> Any:
    """A deep copy made of JSON types alone, so that a template meets no object with methods of its own."""
    if value is None or isinstance(value, bool):
        return value
    for base in (str, int, float):
        if isinstance(value, base):
            return value if type(value) is base else base(value)
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise RequestError(f"{where} is {type(value).__name__}; a chat template takes text, numbers, lists and objects")


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """The last message with a mark at the end of its text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE_MARK}
    if isinstance(content, list):
        for index in range(len(content) - 1, -1, -1):
            part = content[index]
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                marked = {**part, "text": part["text"] + _CONTINUE_MARK}
                return {**message, "content": [*content[:index], marked, *content[index + 1 :]]}
    raise RequestError("continue_final_message: the last message has no text to continue")


def _cut(text: str) -> str:
    """The text before the mark; where the template trimmed the mark it trims the message's end too."""
    at = text.rfind(_CONTINUE_MARK.strip())
    if at < 0:
        raise RequestError("continue_final_message: the chat template leaves out the end of the last message")
    return text[:at] if text.startswith(_CONTINUE_MARK, at) else text[:at].rstrip()
