"""Outputs have the form that was asked for: every kind, in a batch, through every mode of the
engine. A tiny model of random weights takes nearly any token that it may."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from jubako import LLM, RequestOutput, SamplingParams
from jubako.errors import ValidationError
from jubako.sampling_params import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEX = r"^[a-c]{2,5}-\d{1,3}$"
CHOICES = ["red", "green", "greener", 'a "quoted" one', "né"]
GRAMMAR = """
start: sum
sum: NUMBER ("+" NUMBER)~1..3
NUMBER: /[1-9][0-9]{0,2}/
"""
GBNF = 'root ::= "yes" | "no" digit\ndigit ::= [0-9]'
TAG = json.dumps(
    {
        "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f"],
    }
)


def _satisfies_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


FORMS: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"json": SCHEMA}, _satisfies_schema),
    ({"json": SCHEMA, "disable_any_whitespace": True}, _satisfies_schema),
    ({"regex": REGEX}, re.compile(REGEX).fullmatch),
    ({"choice": CHOICES}, CHOICES.__contains__),
    ({"grammar": GRAMMAR}, re.compile(r"[1-9]\d{0,2}(\+[1-9]\d{0,2}){1,3}").fullmatch),
    ({"grammar": GBNF}, re.compile(r"yes|no\d").fullmatch),
]


def params_of(form: dict[str, Any], seed: int, **options: Any) -> SamplingParams:
    options = {"temperature": 1.0, "max_tokens": 400} | options
    return SamplingParams(seed=seed, structured_outputs=StructuredOutputsParams(**form), **options)


def check(outputs: list[RequestOutput], forms: list[Any]) -> None:
    for output, (form, is_right) in zip(outputs, forms, strict=True):
        for answer in output.outputs:
            assert answer.finish_reason == "stop", (form, answer)
            assert is_right(answer.text), (form, answer.text)


MODES: dict[str, dict[str, Any]] = {
    "one step at a time": {"async_scheduling": False},
    "steps overlap": {"async_scheduling": True},
    "preemption": {"async_scheduling": False, "num_gpu_blocks_override": 40, "block_size": 16},
    "preemption, steps overlap": {
        "async_scheduling": True,
        "num_gpu_blocks_override": 40,
        "block_size": 16,
    },
    "prompts in chunks": {"max_num_batched_tokens": 16, "enable_chunked_prefill": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_form_in_every_mode(make_llm: Callable[..., LLM], mode: str) -> None:
    llm = make_llm(**MODES[mode])
    forms = FORMS * 4
    free = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=1)
    params = [params_of(form, seed) for seed, (form, _) in enumerate(forms)] + [free] * 2
    prompts = [f"A {i % 5} of something that is long enough" for i in range(len(params))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check(outputs[:-2], forms)
    for output in outputs[-2:]:
        assert len(output.outputs[0].token_ids) == 60


def test_others_are_not_touched(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    (alone,) = llm.generate(["one two"], greedy, use_tqdm=False)
    mixed = llm.generate(
        ["one two", "x", "one two"],
        [greedy, params_of({"regex": "[ab]{15}"}, 3), greedy],
        use_tqdm=False,
    )
    assert mixed[0].outputs[0].token_ids == alone.outputs[0].token_ids
    assert mixed[2].outputs[0].token_ids == alone.outputs[0].token_ids
    assert re.fullmatch("[ab]{15}", mixed[1].outputs[0].text)


def test_several_answers_go_their_own_ways(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(enable_prefix_caching=True)
    outputs = llm.generate(
        ["the same beginning"] * 2, params_of({"regex": "[a-z]{12}"}, 5, n=6), use_tqdm=False
    )
    texts = {answer.text for output in outputs for answer in output.outputs}
    assert all(re.fullmatch("[a-z]{12}", text) for text in texts)
    assert len(texts) > 3


def test_greedy_takes_the_best_allowed_token(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    letters = "qwzx"
    ids = [llm.get_tokenizer().encode(letter)[0] for letter in letters]
    plain = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=ids)
    masked = params_of({"choice": list(letters)}, 0, temperature=0.0)
    outputs = llm.generate(["a prompt"] * 2, [plain, masked], use_tqdm=False)
    assert outputs[0].outputs[0].text == outputs[1].outputs[0].text


def test_an_end_that_is_ignored_changes_no_text(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    (output,) = llm.generate(
        ["x"],
        params_of({"choice": ["yes", "no"]}, 0, ignore_eos=True, max_tokens=12),
        use_tqdm=False,
    )
    assert output.outputs[0].text in ("yes", "no")
    assert len(output.outputs[0].token_ids) == 12


def test_a_tag_has_its_form_wherever_it_comes(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    params = [params_of({"structural_tag": TAG}, seed, max_tokens=80) for seed in range(12)]
    for output in llm.generate(["x"] * 12, params, use_tqdm=False):
        text = output.outputs[0].text
        for found in re.finditer(r"<f(?P<rest>[^<]*)(?P<end>.{4})?", text, re.DOTALL):
            if found["end"]:
                assert re.fullmatch(r">\s*-?\d+", found["rest"]), text
                assert found["end"] == "</f>", text


def test_one_that_cannot_go_on_ends_alone(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    letters = list("ab")
    outputs = llm.generate(
        ["x", "y"],
        [
            params_of({"regex": "[ab]{5}"}, 0, bad_words=letters),
            params_of({"regex": "[ab]{5}"}, 1),
        ],
        use_tqdm=False,
    )
    assert outputs[0].outputs[0].finish_reason == "error"
    check(outputs[1:], [({}, re.compile("[ab]{5}").fullmatch)])


def test_a_bad_form_is_refused_before_anything_runs(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    with pytest.raises(ValidationError, match="unclosed") as refused:
        llm.generate(["x"], params_of({"regex": "(a"}, 0), use_tqdm=False)
    assert refused.value.parameter == "structured_outputs.regex"
    check(llm.generate(["x"], params_of({"regex": "ab"}, 0), use_tqdm=False), [({}, "ab".__eq__)])
