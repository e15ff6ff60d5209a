"""Sampling parameters: limits, normal form, and that each error names field, value and limit."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jubako import SamplingParams
from jubako.errors import ValidationError
from jubako.sampling_params import MIN_TEMPERATURE, SamplingType

BAD = [
    ("n", 0, "at least 1"),
    ("n", 1.5, "integer"),
    ("n", True, "integer"),
    ("presence_penalty", 2.1, "at most 2"),
    ("frequency_penalty", -2.1, "at least -2"),
    ("repetition_penalty", 0.0, "at least"),
    ("temperature", -0.1, "at least 0"),
    ("temperature", math.nan, "number"),
    ("temperature", math.inf, "at most"),
    ("temperature", "hot", "number"),
    ("top_p", 0.0, "above 0"),
    ("top_p", 1.01, "at most 1"),
    ("top_k", -2, "at least -1"),
    ("min_p", 1.01, "at most 1"),
    ("seed", "x", "integer"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", -5, "at least 1"),
    ("min_tokens", -1, "at least 0"),
    ("min_tokens", 17, "at most 16"),
    ("logprobs", -2, "at least -1"),
    ("prompt_logprobs", -2, "at least -1"),
    ("truncate_prompt_tokens", 0, "at least 1"),
    ("stop", [""], "empty"),
    ("stop", [1], "strings"),
    ("stop_token_ids", ["a"], "token ids"),
    ("allowed_token_ids", [], "empty"),
    ("allowed_token_ids", [1.5], "token ids"),
    ("bad_words", [1], "strings"),
    ("extra_args", [1], "dict"),
    ("ignore_eos", "yes", "True or False"),
    ("detokenize", None, "True or False"),
    ("skip_special_tokens", 1, "True or False"),
    ("logit_bias", {"x": 1}, "token id"),
    ("logit_bias", {1: math.nan}, "number"),
    ("logit_bias", {math.inf: 1}, "token id"),
    ("logit_bias", {1.5: 1}, "token id"),
    ("logit_bias", {"1_0": 1}, "token id"),
    ("logit_bias", {1: 10**400}, "number"),
    ("temperature", 10**400, "at most"),
    ("repetition_penalty", 10**400, "at most"),
    ("repetition_penalty", 1e-320, "at least"),
    ("top_p", 10**400, "at most 1"),
    ("presence_penalty", 10**400, "at most 2"),
    pytest.param("n", 10**5000, "at most", id="n-huge"),
    pytest.param("max_tokens", 10**5000, "at most", id="max_tokens-huge"),
    ("top_k", 2**63, "at most"),
    ("logprobs", 2**63, "at most"),
    ("truncate_prompt_tokens", 2**63, "at most"),
    ("stop", ["a"] * 1025, "at most 1024"),
    ("bad_words", ["a"] * 1025, "at most 1024"),
    ("output_kind", "delta", "RequestOutputKind"),
]


@pytest.mark.parametrize(("name", "value", "limit"), BAD)
def test_bad_value_is_named_with_its_limit(name: str, value: object, limit: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert name in str(caught.value)
    assert limit in str(caught.value)


def test_stop_strings_need_a_detokeniser() -> None:
    with pytest.raises(ValidationError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_normal_form() -> None:
    params = SamplingParams(stop="end", seed=-1, logprobs=True, logit_bias={"7": 1000})
    assert params.stop == ["end"]
    assert params.seed is None
    assert params.logprobs == 1
    assert params.logit_bias == {7: 100.0}
    assert params.stop_token_ids == []


def test_greedy_resets_what_cannot_matter() -> None:
    params = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.5)
    assert params.is_greedy
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert params.sampling_type is SamplingType.GREEDY


def test_tiny_temperature_is_raised() -> None:
    assert SamplingParams(temperature=0.001).temperature == MIN_TEMPERATURE


@pytest.mark.parametrize(
    ("prompt_logprobs", "given_value", "expected"),
    [(None, None, False), (0, None, True), (3, None, True), (3, False, False)],
)
def test_prompt_logprobs_skip_the_prefix_cache(
    prompt_logprobs: int | None, given_value: bool | None, expected: bool
) -> None:
    params = SamplingParams(prompt_logprobs=prompt_logprobs, skip_reading_prefix_cache=given_value)
    assert params.skip_reading_prefix_cache is expected


def test_hold_back_is_one_less_than_the_longest_stop_string() -> None:
    assert SamplingParams(stop=["a", "abcd"]).output_text_buffer_length == 3
    assert SamplingParams().output_text_buffer_length == 0
    kept = SamplingParams(stop=["abcd"], include_stop_str_in_output=True)
    assert kept.output_text_buffer_length == 0


def test_clone_shares_no_list() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[1], logit_bias={1: 2.0})
    copy = params.clone(n=2)
    assert copy.n == 2
    copy.stop_ids.append(5)
    copy.stop_strings.append("b")
    assert copy.logit_bias is not None
    copy.logit_bias[3] = 1.0
    assert params == SamplingParams(stop=["a"], stop_token_ids=[1], logit_bias={1: 2.0})


def test_clone_checks_again() -> None:
    with pytest.raises(ValidationError):
        SamplingParams().clone(max_tokens=0)


@given(
    temperature=st.floats(0, 4, allow_nan=False),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 100),
    seed=st.none() | st.integers(0, 2**63),
    stop=st.lists(st.text(min_size=1), max_size=3),
    max_tokens=st.none() | st.integers(1, 1000),
)
def test_survives_the_wire(**values: object) -> None:
    params = SamplingParams(**values)  # type: ignore[arg-type]
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert decoded == params
