"""Chat templates: Gemma's turns, what templates may do, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from jubako.errors import ValidationError
from jubako.frontend.chat import GEMMA_TEMPLATE, render_chat
from jubako.frontend.tokenizer import Tokenizer

from . import vocabularies

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi "}
ASSISTANT = {"role": "assistant", "content": "Hello!"}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def gemma(*messages: dict[str, Any], **options: Any) -> str:
    return render_chat(GEMMA_TEMPLATE, messages, special_tokens={"bos_token": "<bos>"}, **options)


def test_gemma_turns() -> None:
    assert gemma(USER) == "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    assert gemma(USER, ASSISTANT, USER) == (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello!<end_of_turn>\n"
        "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    )
    assert gemma(USER, add_generation_prompt=False) == (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n"
    )


def test_gemma_system_text_is_part_of_the_first_user_turn() -> None:
    assert gemma(SYSTEM, USER, add_generation_prompt=False) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
    )
    assert gemma(SYSTEM, USER, ASSISTANT, add_generation_prompt=False).count("Be brief.") == 1


def test_gemma_refuses_other_roles() -> None:
    with pytest.raises(ValidationError, match="role tool has no place"):
        gemma(USER, {"role": "tool", "content": "x"})
    with pytest.raises(ValidationError, match="role system has no place"):
        gemma(USER, SYSTEM)


def test_bos_is_there_once() -> None:
    tokenizer = vocabularies.sentencepiece(add_space_prefix=False)
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    text = tokenizer.apply_chat_template([USER])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.bos_token_id) == 1


def test_no_template() -> None:
    with pytest.raises(ValidationError, match=r"no chat template\. Give one .*--chat-template"):
        vocabularies.byte_level().apply_chat_template([USER])


def test_template_of_the_call_goes_first() -> None:
    tokenizer = Tokenizer(vocabularies.trained_byte_level(), chat_template="own")
    assert tokenizer.apply_chat_template([USER]) == "own"
    assert tokenizer.apply_chat_template([USER], chat_template="other") == "other"


def test_variables_reach_the_template() -> None:
    template = "{{ tools | tojson }} {{ enable_thinking }} {{ eos_token }} {{ missing is defined }}"
    text = render_chat(
        template,
        [USER],
        special_tokens={"eos_token": "</s>"},
        tools=[{"name": "<é>"}],
        enable_thinking=False,
    )
    assert text == '[{"name": "<é>"}] False </s> False'


def test_what_published_templates_use() -> None:
    template = (
        "{%- for m in messages %}\n"
        "    {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {% generation %}{{ m.content }}{% endgeneration %}\n"
        "{%- endfor %}\n"
        "{{- strftime_now('%Y') | length }}"
    )
    assert render_chat(template, [USER, ASSISTANT]).split() == ["Hi", "4"]


def test_whitespace_is_handled_as_in_transformers() -> None:
    assert render_chat("  {% if true %}\nx\n  {% endif %}\ny", [USER]) == "x\ny"


# -- going on with the last message -----------------------------------------------------------


def test_final_message_is_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "Hello! I am"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render_chat(CHATML, messages, **options).endswith("assistant\nHello! I am")
    assert gemma(*messages, **options).endswith("<start_of_turn>model\nHello! I am")


def test_final_spaces_stay_where_the_template_keeps_them() -> None:
    messages = [{"role": "assistant", "content": "One, "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render_chat(CHATML, messages, **options).endswith("One, ")
    assert gemma(*messages, **options).endswith("One,")


def test_continuing_and_beginning_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="set one of them to false") as error:
        render_chat(CHATML, [USER], continue_final_message=True)
    assert error.value.parameter == "continue_final_message"


def test_content_that_the_template_does_not_show() -> None:
    for template, message in (("nothing", ASSISTANT), (CHATML, {"role": "user", "content": " "})):
        with pytest.raises(ValidationError, match="whose content appears"):
            render_chat(
                template, [message], add_generation_prompt=False, continue_final_message=True
            )


# -- messages ---------------------------------------------------------------------------------


def test_content_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    assert render_chat("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == (
        "a\nb\nc"
    )


def test_no_content() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    template = "{{ messages[0].content }}|{{ messages[0].tool_calls[0].id }}"
    assert render_chat(template, [message]) == "|1"


def test_messages_are_not_changed() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    render_chat("", [message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "a"}]}


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "at least one message"),
        ("hello", "must be a list"),
        (None, "must be a list"),
        (["hi"], r"messages\[0\] must be an object with a role"),
        ([USER, {"content": "x"}], r"messages\[1\] must be an object with a role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\] must be"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content must be a string"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"part of type 'image_url'; this model takes text only",
        ),
        ([{"role": "user", "content": [3]}], "part of type 'int'"),
    ],
)
def test_unusable_messages(messages: Any, match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        render_chat(CHATML, messages)


# -- templates that fail ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "fails: roles must alternate"),
        ("{% if %}", "The chat template fails"),
        ("{{ messages[0].content + 1 }}", "fails on these messages"),
        ("{{ 1 // 0 }}", "fails on these messages"),
        ("{{ missing.name }}", "'missing' is undefined"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too much recursion"),
        ("{{ range(10000000) | length }}", "chat template fails"),
    ],
)
def test_failures_are_validation_errors(template: str, match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        render_chat(template, [USER])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    with pytest.raises(ValidationError, match="chat template fails"):
        render_chat(template, [USER])
