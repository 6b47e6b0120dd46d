"""Chat templates render as transformers renders them, and cannot leave the sandbox, hang or fill the memory."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pelton.builder.tokenizer_corpus import CONVERSATIONS
from pelton.runtime.errors import PeltonError, RequestError, TokenizerError
from pelton.runtime.text import ChatTemplate
from pelton.runtime.text.limits import Limits

from .tokenizers import CHATML

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = [{"role": "user", "content": "Hi & <you>"}]

TEMPLATES = {
    "chatml": CHATML,
    "whitespace control": """
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{% for m in rest -%}
    {% if not loop.first %}
| {{ loop.index }} of {{ loop.length }}, {{ loop.previtem.role }} before
    {% endif %}
    [{{ m.role | upper }}] {{ m['content'] | trim }}
{% endfor %}
{% if system is defined %}({{ system }}){% endif %}
""",
    "tools": """{% if tools %}{% for tool in tools %}{{ tool | tojson }}
{{ tool.function | tojson(indent=2) }}{{ tool | tojson(sort_keys=true, separators=(',', ':')) }}
{% endfor %}{% elif tools is not none %}no tools{% endif %}{% for m in messages %}{% if m.tool_calls is defined %}
{% for call in m.tool_calls %}{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}
{{ call.function.arguments | tojson }}{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}
{% endif %}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}""",
    "alternation": """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user and assistant') }}{% endif %}{% if m.role == 'user' %}
{{ '[INST] ' + m.content + ' [/INST]' }}{% elif m.role == 'assistant' %}{{ m.content + eos_token }}
{% else %}{{ raise_exception('unknown role ' ~ m.role) }}{% endif %}{% endfor %}""",
    "clock": "{{ strftime_now('%d %b %Y, %H:%M:%S') }}{% if date_string is not defined %} no date{% endif %}",
    "loop controls": """{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
{% if loop.index > 3 %}{% break %}{% endif %}{{ m.role }},{% else %}none{% endfor %}""",
    "generation": """{% set x = 1 %}{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}{% set x = 2 %}{{ m.content }}{{ x }}{% endgeneration %}{{ x }}
{%- generation -%} {{ eos_token }} {%- endgeneration -%}{% endif %}{% endfor %}{{ x }}""",
    "namespace and macro": """{% macro show(m, last=false) -%}<{{ m.role }}{{ '!' if last }}>
{%- if m.content is string %}{{ m.content }}{% elif m.content is iterable %}
{% for p in m.content %}{{ p.text }}{% endfor %}
{%- endif %}{{ caller() if caller }}{%- endmacro %}
{% set ns = namespace(users=0, last=-1, seen=[]) %}{% for m in messages %}{% if m.role == 'user' %}
{% set ns.users = ns.users + 1 %}{% set ns.last = loop.index0 %}{% set ns.seen = ns.seen + [m.content] %}{% endif %}
{% endfor %}{% for m in messages %}{{ show(m, loop.index0 == ns.last) }}{% endfor %}{{ ns.users }}{{ ns.seen }}
{% call show({'role': 'x', 'content': 'y'}) %}called{% endcall %}""",
    "thinking": """{% for m in messages %}{% set content = m.content if m.content is string else '' %}{% set r = '' %}
{% if m.reasoning_content is string %}{% set r = m.reasoning_content %}{% elif '</think>' in content %}
{% set r = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{ m.thinking }}|{{ r.strip() }}|{{ content }}
{% endfor %}{% if add_generation_prompt %}>{% if enable_thinking is defined and enable_thinking is false %}
<think>

</think>{% endif %}{% endif %}""",
    "filters": """{{ messages | map(attribute='role') | join(', ') }} {{ messages | length }}
{{ messages | last | string }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ messages[-1:] }} {{ messages[::-1][0].role }}
{{ ['b', 'a'] | sort | join }} {{ {'k': [1, 2.5, none, true]} }} {{ 'a' ~ 1 ~ none ~ [1] }}
{{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 5 }}
{{ '%s and %03d' % ('x', 7) }} {{ '{:>4}|{a}'.format('y', a=2) }} {{ 'ab' * 3 }}
{{ ('a b c' | replace(' ', '-')).upper() }}
{{ 'x' | indent(4, true) }} {{ '<b>' | e }} {{ dict(a=1, b=2).items() | list }} {{ range(2, 8, 3) | list }}
{{ 'q' in 'quiz' }}
{{ (messages[0].content or '')[:3] }} {{ messages[0].nothing is defined }} {{ messages[0].nothing }}
{{ 'a,b'.split(',') }}
{% filter upper %}shout{% endfilter %}{% set text %}block {{ 1 + 1 }}{% endset %}{{ text | trim }}
{{ '-'.join(['p', 'q']) }}
{{ 'e' | center(5) }} {{ 3.0 }} {{ -(messages | length) }} {{ [1, 2, 3] | sum }} {{ (1, 'two', [3]) }}
{{ 'abc' | list }}""",
    "recursion": """{% for m in [{'n': 1, 'c': [{'n': 2, 'c': [{'n': 3}]}, {'n': 4}]}] recursive %}{{ m.n }}
{{ loop.depth }}
{% if m.c %}({{ loop(m.c) }}){% endif %}{% endfor %}""",
    "undefined": "{{ messages[0].content.nothing.more }}",
    "type error": "{% for m in messages %}{{ m.content + 1 }}{% endfor %}",
    "documents": "{% for d in documents %}{{ d.title }}: {{ d.text }}{% endfor %}{{ documents is none }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime(2024, 2, 29, 23, 59, 58)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", _Clock)
    template = ChatTemplate(TEMPLATES[name], SPECIAL, clock=lambda: now)
    rendered = 0
    for conversation in CONVERSATIONS:
        arguments: dict[str, Any] = {"add_generation_prompt": True, **conversation}
        if arguments.get("continue_final_message"):
            arguments["add_generation_prompt"] = False
        before = json.dumps(arguments)
        messages = arguments.pop("messages")
        try:
            everything: dict[str, Any] = {**arguments, **SPECIAL, "chat_template": TEMPLATES[name]}
            expected = render_jinja_template([messages], **everything)[0][0]
        except Exception:
            expected = None
        try:
            got = template.render(messages, **arguments)
        except PeltonError:
            got = None
        assert got == expected, before
        assert json.dumps({**arguments, "messages": messages}, sort_keys=True) == json.dumps(
            json.loads(before), sort_keys=True
        )
        rendered += got is not None
    assert rendered or name in ("undefined", "type error")


class _Clock:
    @staticmethod
    def now() -> datetime:
        return datetime(2024, 2, 29, 23, 59, 58)


def test_none_values_and_rich_types() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m }}{% endfor %}")
    assert template.render([{"role": "assistant", "content": None, "tool_calls": ()}]) == str(
        {"role": "assistant", "tool_calls": []}
    )
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[1\] is object"):
        template.render([{"role": "user", "content": ["x", object()]}])
    for bad in ([], "text", [1], None):
        with pytest.raises(RequestError, match="message"):
            template.render(bad)  # type: ignore[arg-type]


def test_named_templates() -> None:
    both = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert both.render(USER) == "plain"
    assert both.render(USER, tools=[{"type": "function"}]) == "tools"
    with pytest.raises(RequestError, match="none named 'default'"):
        ChatTemplate({"rag": "x"}).render(USER)


def test_continue_final_message() -> None:
    template = ChatTemplate(CHATML)
    chat = [*USER, {"role": "assistant", "content": "Once upon "}]
    text = template.render(chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon ")
    trimmed = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    assert trimmed.render(chat, None, False, continue_final_message=True) == "[Hi & <you>][Once upon"
    with pytest.raises(RequestError, match="exclude each other"):
        template.render(chat, continue_final_message=True)
    with pytest.raises(RequestError, match="leaves out"):
        ChatTemplate("x").render(chat, add_generation_prompt=False, continue_final_message=True)


def test_errors_name_the_line() -> None:
    with pytest.raises(TokenizerError, match=r"'default', line 2: .*'\{% if %\}'"):
        ChatTemplate("line one\n{% if %}\n")
    with pytest.raises(TokenizerError, match="line 1: No filter named"):
        ChatTemplate("{{ x | no_such_filter }}")
    with pytest.raises(RequestError, match="refuses this conversation: no pirates"):
        ChatTemplate("{{ raise_exception('no pirates') }}").render(USER)
    with pytest.raises(RequestError, match="line 3: UndefinedError"):
        ChatTemplate("a\nb\n{{ x.y.z }}").render(USER)
    with pytest.raises(RequestError, match="line 2: TypeError"):
        ChatTemplate("{% for m in messages %}\n{{ m.content + 1 }}{% endfor %}").render(USER)
    with pytest.raises(TokenizerError, match="characters"):
        ChatTemplate("x" * (1 << 21))


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(a=1) }}",
    "{{ messages[0].pop('role') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__closure__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{m.__class__}'.format_map({'m': messages}) }}",
    "{{ (messages | map(attribute='__class__') | list)[0].x }}",
    "{{ messages | attr('__class__') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ dict.__class__.__mro__ }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ namespace(__class__=1) }}",
    "{% include 'x' %}",
    "{% import 'os' as os %}",
    "{% extends '/etc/passwd' %}",
    "{{ ''.encode.__self__ }}",
    "{{ (messages | batch(1)).gi_frame.f_globals }}",
    "{{ 'x'.translate({120: 'y'}) }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_way_out(source: str) -> None:
    try:
        assert ChatTemplate(source).render(USER) == ""  # an attribute that is out of reach is undefined
    except PeltonError:
        pass
    assert USER == [{"role": "user", "content": "Hi & <you>"}]


DOUBLE = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
LISTS = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x == [ns.x] }}"
BOMBS = {
    "turns": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "macro text": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% else %}xxxxxxxx{% endif %}"
    "{% endmacro %}{{ f(40) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for m in [[]] recursive %}{% if loop.depth < 60 %}{{ loop([[], []]) }}{% endif %}"
    "{% endfor %}",
    "text in loops": "{% for i in range(90000) %}" + "x" * 10_000 + "{% endfor %}",
    "output": "{% set x = 'x' * 100000 %}{% for i in range(90000) %}{{ x }}{% endfor %}",
    "repeat": "{{ 'x' * 10 ** 9 }}",
    "repeat twice": "{{ ('x' * 100000) * 100000 }}",
    "repeat a list": "{{ ([1] * 100000) * 100000 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "product": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"
    "{{ ns.x }}",
    "add": DOUBLE.replace("STEP", "ns.x + ns.x"),
    "concatenate": DOUBLE.replace("STEP", "ns.x ~ ns.x"),
    "join": DOUBLE.replace("STEP", "[ns.x, ns.x] | join"),
    "str.join": DOUBLE.replace("STEP", "ns.x.join(['a', 'b', 'c'])"),
    "replace": DOUBLE.replace("STEP", "ns.x | replace('b', ns.x)"),
    "str.replace": DOUBLE.replace("STEP", "ns.x.replace('', ns.x)"),
    "percent": DOUBLE.replace("STEP", "'%s%s' % (ns.x, ns.x)"),
    "format": DOUBLE.replace("STEP", "'{0}{0}'.format(ns.x)"),
    "format filter": DOUBLE.replace("STEP", "'%s%s' | format(ns.x, ns.x)"),
    "block": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "percent width": "{{ '%999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "format width": "{{ '{:999999999}'.format(1) }}",
    "format nested": "{{ '{:{w}}'.format(1, w=999999999) }}",
    "center": "{{ 'x' | center(999999999) }}",
    "ljust": "{{ 'x'.ljust(999999999) }}",
    "zfill": "{{ '1'.zfill(999999999) }}",
    "expandtabs": "{{ '\t'.expandtabs(999999999) }}",
    "indent": "{{ ('a\n' * 50000) | indent(99999) }}",
    "json indent": "{{ [1] | tojson(indent=999999999) }}",
    "json separators": "{{ range(90000) | list | tojson(separators=('x' * 100000, ':')) }}",
    "batch": "{{ [1] | batch(999999999, 0) | list }}",
    "slice filter": "{{ [1] | slice(999999999) | list }}",
    "round": "{{ 1 | round(999999999) }}",
    "joined generator": "{{ range(90000) | map('string') | join('x' * 100000) }}",
    "str.joined generator": "{{ ('x' * 100000).join(range(90000) | map('string')) }}",
    "sum of lists": "{{ [[1]] * 99999 | sum(start=[]) }}{{ ([[1]] * 99999) | sum(start=[]) }}",
    "lists": LISTS.replace("STEP", "[ns.x, ns.x]"),
    "tuples": LISTS.replace("STEP", "(ns.x, ns.x)"),
    "dicts": LISTS.replace("STEP", "{'a': ns.x, 'b': ns.x}"),
    "dict()": LISTS.replace("STEP", "dict(a=ns.x, b=ns.x)"),
    "items": LISTS.replace("STEP", "[dict(a=ns.x, b=ns.x).items()]"),
    "values": LISTS.replace("STEP", "[dict(a=ns.x, b=ns.x).values(), 1]"),
    "added lists": LISTS.replace("STEP", "ns.x + ns.x"),
    "shown lists": "{% set x = ['x' * 100000] * 90000 %}{{ x }}",
    "lists to text": "{% set x = ['x' * 100000] * 90000 %}{{ x | string | length }}",
    "lists to json": "{% set x = ['x' * 100000] * 90000 %}{{ x | tojson | length }}",
    "lists concatenated": "{% set x = ['x' * 100000] * 90000 %}{{ (x ~ '') | length }}",
    "kept slices": "{% set x = 'x' * 100000 %}{% set ns = namespace(l=[]) %}{% for i in range(90000) %}"
    "{% set ns.l = ns.l + [x[1:]] %}{% endfor %}",
    "kept copies": "{% set x = 'x' * 100000 %}{% set ns = namespace(l=[]) %}{% for i in range(90000) %}"
    "{% set ns.l = ns.l + [x.upper()] %}{% endfor %}",
    "split": "{{ ('a,' * 100000 * 70).split(',') | length }}",
    "characters": "{{ ('ab' * 100000 * 20) | list | length }}",
    "namespaces": "{% set ns = namespace(x=1) %}{% for i in range(3000) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}"
    "{% endfor %}"
    "{{ ns.x.a.nothing.more }}",
}


SMALL = Limits(steps=200_000, chars=4_000_000, elements=200_000, seconds=2.0)


@pytest.mark.parametrize("name", BOMBS)
def test_no_bomb_goes_off(name: str) -> None:
    started = time.monotonic()
    with pytest.raises(PeltonError):
        ChatTemplate(BOMBS[name], limits=SMALL).render(USER)
    assert time.monotonic() - started < 4.0


def test_default_limits_end_an_endless_template() -> None:
    with pytest.raises(RequestError, match="too many steps|longer than 5 s"):
        ChatTemplate(BOMBS["turns"]).render(USER)


def test_limits_do_not_meet_long_conversations() -> None:
    chat = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 200} for i in range(2000)]
    assert len(ChatTemplate(CHATML).render(chat)) > 2_000_000
    assert ChatTemplate(TEMPLATES["namespace and macro"]).render(chat)
    assert ChatTemplate(TEMPLATES["filters"]).render(chat)
