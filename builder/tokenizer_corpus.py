"""Texts, id sequences and conversations on which a converted tokenizer is compared with its original."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

_PROSE = (
    "",
    "a",
    " ",
    "\n",
    "Hello world",
    " Hello  world ",
    "The quick brown fox jumps over the lazy dog. It's 3:45 p.m., isn't it? They'll've gone, I'm sure!",
    "Où est l'élève ? À côté de la forêt, près du cœur de Noël.",
    "Straße, Übergröße, fünfzig Äpfel; İstanbul'da ığdır; Žluťoučký kůň úpěl ďábelské ódy",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "敏捷的棕色狐狸跳过了懒狗。今天天气怎么样？我想吃拉面。",
    "色は匂へど散りぬるを 我が世誰ぞ常ならむ ｶﾀｶﾅ ＡＢＣ１２３",
    "다람쥐 헌 쳇바퀴에 타고파",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "ሰማይ አይታረስ ንጉሥ አይከሰስ ᚠᛇᚻ᛫ᛒᛦᚦ ꙮ 𐍈 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𒀀𒁀",
    "e\u0301 vs \u00e9, A\u030a vs \u00c5, \ufb01 \u2167 \u00bd \u2460 \u1e9b\u0323",
)
_EMOJI = (
    "😀😃 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇯🇵 1️⃣ ❤️ ☺︎",
    "text😀text 🤷🏾‍♀️,🧑‍💻.",
)
_CODE = (
    'def f(x: int = 0) -> str:\n    """Doc."""\n    return f"{x!r:>10}" if x else \'\'\n\n\nprint(f(1_000))\n',
    "for (int i = 0; i < n; ++i) {\n\ta[i] = b[i] << 2 | ~c[i];  // comment\n}\r\n",
    '<div class="a">&nbsp;<br/></div><!-- x --> <s>strike</s> <unk> [INST] <<SYS>> </s>',
    '{"k": [1, 2.5e-10, null, true], "u": "\\u00e9\\n"}',
    "SELECT * FROM t WHERE a <> 'x''y' AND b IN (1,2,3); -- end",
    "https://example.com/a_b-c?d=%20&e=f#g user@example.org C:\\Users\\x $HOME/.bashrc",
    "\\frac{a}{b} \\sum_{i=0}^{n} x_i^2 = \\alpha \\neq \\beta",
)
_DIGITS = (
    "0 1 12 123 1234 12345 123456 1234567 12345678901234567890",
    "3.14159 1,000,000 -42 +7 1e10 0x1F 2024-07-26T12:30:45Z ١٢٣ १२३ ½ x²",
)
_SPACES = (
    "  two   three    four     five",
    "a\tb\t\tc\n\nd\n\n\ne\r\nf \n g\x0b\x0c",
    "   leading and trailing   ",
    "nbsp\u00a0thin\u2009zero\u200bwidth\u3000wide\u2028line\ufeffbom",
    "\u2581meta\u2581space \u0120byte\u0120level ##piece </w>",
)
_ODD = (
    "\x00\x01\x02\x7f\x80\x9f",
    "\ufffd \ufffe \uffff \U0010ffff \ue000",
    "<0x0A><0xE2><0xff>",
    "I said ' so . Really ? Yes ! No , n't 'm 's 've 're do not",
)
_RUNS = ("a" * 1500, " " * 300, "\n" * 60, "=" * 400, "ab" * 500, "🙂" * 60, "é" * 200, "1" * 120, "Na " * 120)

TEXTS: tuple[str, ...] = (*_PROSE, *_EMOJI, *_CODE, *_DIGITS, *_SPACES, *_ODD, *_RUNS)


def special_texts(special: Sequence[str]) -> list[str]:
    """Texts with special and added tokens inside: alone, in a word, between spaces, doubled, cut short."""
    texts = []
    for token in special:
        texts += [token, f"a{token}b", f" {token} x", token[:-1]]
    if special:
        texts.append("".join(special))
        texts.append(f"{special[0]}{special[0]}\n{special[-1]} end")
    return texts


def id_sequences(vocab_size: int, byte_ids: Sequence[int], special_ids: Sequence[int]) -> list[list[int]]:
    """Ids that no text encodes to.

    ``byte_ids``: the ids of bytes 0 to 255 where the vocabulary has them (tokens of one byte), else empty.
    """
    pick = random.Random(20240726)
    sequences: list[list[int]] = [[], [vocab_size, 0, vocab_size + 7]]
    sequences += [[pick.randrange(vocab_size) for _ in range(length)] for length in (1, 2, 3, 5, 8, 40, 40, 120)]
    if special_ids:
        mixed = [pick.choice(special_ids) if pick.random() < 0.4 else pick.randrange(vocab_size) for _ in range(60)]
        sequences += [list(special_ids), mixed]
    if byte_ids:
        raw = ("é", "日本", "🙂", "🙂🙂", "a🙂b")
        whole = [[byte_ids[byte] for byte in text.encode()] for text in raw]
        sequences += whole
        sequences += [ids[:-1] for ids in whole] + [ids[1:] for ids in whole]  # cut at the end, at the start
        sequences += [
            [byte_ids[byte] for byte in data] for data in (b"\xff", b"a\xffb", b"\xed\xa0\x80", b"\xf4\x90\x80")
        ]
        noise = [pick.choice(byte_ids) if pick.random() < 0.7 else pick.randrange(vocab_size) for _ in range(80)]
        sequences.append(noise)
        if special_ids:  # a special token inside a character
            first, *rest = whole[2]
            sequences.append([first, special_ids[0], *rest])
    return sequences


_WEATHER: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the <b>weather</b> & \"wind\" for a place, e.g. 'Zürich' 東京",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "City"},
                "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["place"],
        },
    },
}
_CLOCK: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "now",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {}},
    },
}
_SYSTEM = {"role": "system", "content": "You are terse.\nAnswer in French."}
_USER = {"role": "user", "content": "What is <gravity> & why?"}
_ANSWER = {"role": "assistant", "content": "A force: 9.81 m/s²."}
_AGAIN = {"role": "user", "content": "  Et la lune ? 🌙\n"}


def _tool_call(arguments: Any) -> dict[str, Any]:
    return {"id": "call12345", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


_CALLED = {"role": "assistant", "content": "", "tool_calls": [_tool_call({"place": "Zürich", "days": [1, 2]})]}
_CALLED_TEXT = {"role": "assistant", "content": "", "tool_calls": [_tool_call('{"place": "Zürich"}')]}
_RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": '{"t": 21.5, "s": "sunny"}'}
_THOUGHT = {"role": "assistant", "reasoning_content": "Newton, then Einstein.", "content": "A force."}
_TAGGED = {"role": "assistant", "content": "<think>\nNewton.\n</think>\n\nA force."}
_PARTS = {"role": "user", "content": [{"type": "text", "text": "Part one. "}, {"type": "text", "text": "Part two."}]}

#: Keyword arguments of ChatTemplate.render (all JSON). Many templates refuse some of them; then both must refuse.
CONVERSATIONS: tuple[Mapping[str, Any], ...] = (
    {"messages": [_USER]},
    {"messages": [_USER], "add_generation_prompt": False},
    {"messages": [_SYSTEM, _USER]},
    {"messages": [_SYSTEM, _USER, _ANSWER], "add_generation_prompt": False},
    {"messages": [_SYSTEM, _USER, _ANSWER, _AGAIN]},
    {"messages": [_USER, _ANSWER, _AGAIN, _ANSWER, _USER, _ANSWER, _AGAIN]},
    {"messages": [_SYSTEM, _USER], "tools": [_WEATHER, _CLOCK]},
    {"messages": [_USER], "tools": [_WEATHER]},
    {"messages": [_USER], "tools": []},
    {"messages": [_SYSTEM, _USER, _CALLED, _RESULT], "tools": [_WEATHER, _CLOCK]},
    {"messages": [_USER, _CALLED_TEXT, _RESULT, _ANSWER, _AGAIN], "tools": [_WEATHER]},
    {"messages": [_USER, _CALLED, _RESULT, _RESULT, _ANSWER], "tools": [_WEATHER], "add_generation_prompt": False},
    {"messages": [_USER, _THOUGHT, _AGAIN]},
    {"messages": [_USER, _TAGGED, _AGAIN]},
    {"messages": [_USER], "enable_thinking": False},
    {"messages": [_USER], "enable_thinking": True, "add_generation_prompt": True},
    {"messages": [_PARTS]},
    {"messages": [_SYSTEM]},
    {"messages": [_USER, _USER]},
    {"messages": [_ANSWER, _USER]},
    {"messages": [{"role": "user", "content": ""}]},
    {"messages": [{"role": "developer", "content": "Be kind."}, _USER]},
    {"messages": [{"role": "pirate", "content": "Arr."}]},
    {"messages": [{"role": "user"}]},
    {"messages": [_USER], "documents": [{"title": "Moon", "text": "The moon is <far>."}]},
    {"messages": [_USER, _ANSWER], "add_generation_prompt": False, "continue_final_message": True},
)
