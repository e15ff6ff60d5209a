"""Does each family's way of writing calls and thoughts come apart, however the text is cut?"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jubako.frontend.answers.parser import AnswerParser, AnswerStyle, ParsedAnswer, parse_answer
from jubako.frontend.answers.reasoning import think_tags
from jubako.frontend.answers.registry import TOOL_STYLES, model_style

TOOLS = frozenset({"get_weather", "add", "now"})

WEATHER = ("get_weather", {"city": "São Paulo", "days": [1, 2], "unit": None})
ADD = ("add", {"a": -1.5, "b": {"deep": "}]\"'\\ \n</tool_call"}})
NOW = ("now", {})

ARGS = [json.dumps(arguments) for _, arguments in (WEATHER, ADD, NOW)]
TOOL_CALLS, CALL, SEP, CALL_END, CALLS_END = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)


def _object(call: tuple[str, dict], key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]})


CASES: dict[str, tuple[str, str, str, list]] = {
    # name: style, answer, content, calls
    "hermes": (
        "hermes",
        "Let me see.\n<tool_call>\n"
        + _object(WEATHER)
        + "\n</tool_call>\n<tool_call>\n"
        + _object(NOW)
        + "\n</tool_call>",
        "Let me see.",
        [WEATHER, NOW],
    ),
    "hermes, a marker in a string": (
        "hermes",
        f"<tool_call>{_object(ADD)}</tool_call>",
        "",
        [ADD],
    ),
    "hermes, arguments first": (
        "hermes",
        f'<tool_call>{{"arguments": {ARGS[0]}, "name": "get_weather"}}</tool_call> Done.',
        " Done.",
        [WEATHER],
    ),
    "hermes, arguments as a string": (
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(ARGS[0])}}}</tool_call>',
        "",
        [WEATHER],
    ),
    "hermes, no arguments": ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    "hermes, not a call": (
        "hermes",
        "<tool_call> sorry</tool_call>",
        "<tool_call> sorry</tool_call>",
        [],
    ),
    "llama": ("llama3_json", _object(WEATHER, "parameters"), "", [WEATHER]),
    "llama, tag and two": (
        "llama3_json",
        f"<|python_tag|>{_object(WEATHER, 'parameters')}; {_object(NOW, 'parameters')}<|eom_id|>",
        "",
        [WEATHER, NOW],
    ),
    "llama, other JSON": ("llama3_json", '{"name": "Bob", "x": 1}', '{"name": "Bob", "x": 1}', []),
    "llama, text": ("llama3_json", "It is {warm}.", "It is {warm}.", []),
    "pythonic": (
        "pythonic",
        "[get_weather(city='São Paulo', days=[1, 2], unit=None), now()]",
        "",
        [WEATHER, NOW],
    ),
    "pythonic, marked": (
        "pythonic",
        "<|python_start|>[add(a=-1.5, b={'deep': '}]\"\\'\\\\ \\n</tool_call'})]<|python_end|>",
        "",
        [ADD],
    ),
    "pythonic, a list": ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
    "pythonic, another name": ("pythonic", "[system('x')]", "[system('x')]", []),
    "mistral, list": (
        "mistral",
        f"Well. [TOOL_CALLS] [{_object(WEATHER)}, {_object(NOW)}]",
        "Well.",
        [WEATHER, NOW],
    ),
    "mistral, names": (
        "mistral",
        f"[TOOL_CALLS]get_weather[ARGS]{ARGS[0]}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{{}}",
        "",
        [WEATHER, NOW],
    ),
    "deepseek v3": (
        "deepseek_v3",
        f"Hm.{TOOL_CALLS}{CALL}function{SEP}get_weather\n```json\n{ARGS[0]}\n```{CALL_END}\n"
        f"{CALL}function{SEP}now\n```json\n{{}}\n```{CALL_END}{CALLS_END}<｜end▁of▁sentence｜>",
        "Hm.",
        [WEATHER, NOW],
    ),
    "deepseek v3.1": (
        "deepseek_v3",
        f"{TOOL_CALLS}{CALL}add{SEP}{ARGS[1]}{CALL_END}{CALL}now{SEP}{{}}{CALL_END}{CALLS_END}",
        "",
        [ADD, NOW],
    ),
    "gemma, object": ("gemma3", _object(WEATHER, "parameters"), "", [WEATHER]),
    "gemma, fence": (
        "gemma3",
        f"Sure:\n```json\n{_object(WEATHER, 'parameters')}\n```\n",
        "Sure:",
        [WEATHER],
    ),
    "gemma, list in a fence": (
        "gemma3",
        f"```tool_call\n[{_object(WEATHER)}, {_object(NOW)}]\n```",
        "",
        [WEATHER, NOW],
    ),
    "gemma, python": ("gemma3", "```tool_code\nnow()\n```", "", [NOW]),
    "gemma, list of python": ("gemma3", "[now(), now()]", "", [NOW, NOW]),
    "gemma, code": ("gemma3", "```python\nprint(1)\n```", "```python\nprint(1)\n```", []),
    "gemma, text": ("gemma3", " now and then", " now and then", []),
    "functiongemma": (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>São Paulo<escape>,days:[1,2],unit:null}"
        "<end_function_call><start_function_call>call:now{}<end_function_call>",
        "",
        [WEATHER, NOW],
    ),
    "harmony": (
        "openai",
        "<|channel|>commentary<|message|>Looking.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{ARGS[0]}<|call|>",
        "Looking.",
        [WEATHER],
    ),
    "harmony, recipient in the role": (
        "openai",
        f" to=functions.add<|channel|>commentary json<|message|>{ARGS[1]}<|call|>",
        "",
        [ADD],
    ),
    "harmony, no header": ("openai", "Plain words.", "Plain words.", []),
}


def calls_of(answer: ParsedAnswer) -> list:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize("name", CASES)
def test_an_answer_comes_apart(name: str) -> None:
    style, text, content, calls = CASES[name]
    answer = parse_answer(text, AnswerStyle(calls=TOOL_STYLES[style]), TOOLS)
    assert calls_of(answer) == calls
    assert answer.content == content


def in_pieces(text: str, cuts: list[int], style: AnswerStyle) -> ParsedAnswer:
    parser, answer = AnswerParser(style, TOOLS), ParsedAnswer()
    for begin, end in zip([0, *cuts], [*cuts, len(text)]):
        answer.add(parser.feed(text[begin:end]))
    answer.add(parser.end())
    return answer


@pytest.mark.parametrize("name", CASES)
def test_every_cut_in_two_and_single_characters_give_the_same(name: str) -> None:
    chosen, text, *_ = CASES[name]
    style = AnswerStyle(calls=TOOL_STYLES[chosen])
    whole = parse_answer(text, style, TOOLS)
    assert in_pieces(text, list(range(1, len(text))), style) == whole
    for cut in range(len(text)):
        assert in_pieces(text, [cut], style) == whole


@pytest.mark.parametrize("style", TOOL_STYLES)
@settings(deadline=None)
@given(data=st.data())
def test_any_text_in_any_pieces_gives_the_same(style: str, data: st.DataObject) -> None:
    parts = st.sampled_from(
        [
            *(text[begin : begin + size] for _, text, *_ in CASES.values() for begin in (0, 9, 31)
              for size in (1, 12, 60)),
            "<|channel|>analysis<|message|>", "<|end|>", "[TOOL_CALLS]", "<tool_call>", "```json\n",
            '{"name": "add"', ', "arguments": ', "}", "]", "[", "(", ")", '"', "\\", "\n", " x",
        ]
    )  # fmt: skip
    text = "".join(data.draw(st.lists(parts, max_size=8)))
    cuts = sorted(data.draw(st.sets(st.integers(0, max(len(text), 1) - 1), max_size=8)))
    chosen = AnswerStyle(think_tags(), TOOL_STYLES[style])
    assert in_pieces(text, cuts, chosen) == parse_answer(text, chosen, TOOLS)


def test_arguments_stream_before_the_call_ends() -> None:
    parser = AnswerParser(AnswerStyle(calls=TOOL_STYLES["hermes"]), TOOLS)
    answer = ParsedAnswer()
    answer.add(parser.feed('<tool_call>{"name": "add", "arguments": {"a": 1, "b'))
    assert [(call.name, call.arguments) for call in answer.calls] == [("add", '{"a": 1, "b')]


def test_a_cut_answer_keeps_what_was_called() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1'
    answer = parse_answer(text, AnswerStyle(calls=TOOL_STYLES["hermes"]), TOOLS)
    assert [(call.name, call.arguments) for call in answer.calls] == [("add", '{"a": 1')]


THINKING = AnswerStyle(think_tags())


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\nHm.\n\nSo.\n</think>\n\nYes.", False, "Hm.\n\nSo.", "Yes."),
        ("Hm.\n</think>\nYes.", True, "Hm.", "Yes."),
        ("<think>Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("Yes, <think> is a tag.", False, "", "Yes, <think> is a tag."),
        ("<think>Hm", False, "Hm", ""),
        ("", True, "", ""),
        ("Zero: \0\0\0!", False, "", "Zero: \0\0\0!"),
        ("<thin", False, "", "<thin"),
    ],
)
def test_thoughts_stand_in_front(text: str, inside: bool, reasoning: str, content: str) -> None:
    style = AnswerStyle(think_tags(inside=inside))
    answer = parse_answer(text, style)
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert in_pieces(text, list(range(1, len(text))), style) == answer


def test_a_call_in_a_thought_is_none() -> None:
    call = f"<tool_call>{_object(NOW)}</tool_call>"
    style = AnswerStyle(think_tags(), TOOL_STYLES["hermes"])
    answer = parse_answer(f"<think>{call}</think>{call}", style, TOOLS)
    assert calls_of(answer) == [NOW]
    assert answer.reasoning == call


def test_channels_hold_thoughts_and_answers() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Yes.<|return|>"
    )
    answer = parse_answer(text, AnswerStyle(calls=TOOL_STYLES["openai"]))
    assert (answer.reasoning, answer.content) == ("Hm.", "Yes.")


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{% if tools %}<tool_call></tool_call>{% endif %}", "hermes", None),
        ("{% if tools %}<tool_call>{% endif %}<think></think>", "hermes", "think"),
        ("{% for tool in tools %}{% endfor %}[TOOL_CALLS]", "mistral", None),
        ("{{ tools }}<|start|><|channel|>analysis", "openai", "openai"),
        ("<start_of_turn>user", "gemma3", None),
        (None, "gemma3", None),
    ],
)
def test_a_template_tells_how_its_model_writes(
    template: str | None, tools: str, reasoning: str | None
) -> None:
    style = model_style(template)
    assert (style.tools, style.reasoning) == (tools, reasoning)
    assert style.template_takes_tools == ("tools" in (template or ""))


def test_the_prompt_tells_whether_thinking_has_begun() -> None:
    style = model_style("{{ tools }}<think></think>")
    inside = style.of_answer("...<think>\n", with_tools=False)
    outside = style.of_answer("...<think>\n\n</think>\n\n", with_tools=False)
    assert inside is not None
    assert outside is not None
    assert parse_answer("a</think>b", inside).reasoning == "a"
    assert parse_answer("a", outside).content == "a"
