"""Each bad request gets its own clear error; a good one reaches the core complete."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from jubako.config import JubakoConfig
from jubako.errors import NotImplementedFeatureError, ValidationError
from jubako.frontend.input_processor import (
    MAX_N,
    InputProcessor,
    assign_request_id,
)
from jubako.frontend.tokenizer import LONG_TEXT
from jubako.sampling_params import PoolingParams, SamplingParams, StructuredOutputsParams
from tests.engine.fakes import EOS, MAX_MODEL_LEN, VOCAB_SIZE
from tests.frontend.driver import ids_of, ready, tokenizer

OTHER_EOS = 299


def make(*, policy: Any = "fcfs", with_tokenizer: bool = True, **options: Any) -> InputProcessor:
    config = JubakoConfig.from_options(options)
    config = config.replace(model_config={"eos_token_ids": (EOS, OTHER_EOS)})
    own_ready = msgspec.structs.replace(ready, scheduling_policy=policy)
    return InputProcessor(config, own_ready, tokenizer if with_tokenizer else None)


processor = make()


def process(prompt: Any, params: Any = None, **options: Any) -> Any:
    return processor.process_inputs("id", prompt, params or SamplingParams(), **options).request


def completed(**options: Any) -> SamplingParams:
    return process([5, 6, 7], SamplingParams(**options)).sampling_params


# -- prompts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("héllo", "héllo"),
        ({"prompt": "héllo"}, "héllo"),
        (ids_of("héllo"), None),
        (tuple(ids_of("héllo")), None),
        ({"prompt_token_ids": ids_of("héllo")}, None),
        ({"prompt_token_ids": ids_of("héllo"), "prompt": "shown"}, "shown"),
        (np.array(ids_of("héllo")).tolist(), None),
        (list(np.array(ids_of("héllo"))), None),
    ],
)
def test_forms_of_a_prompt(prompt: Any, text: str | None) -> None:
    result = processor.process_inputs("id", prompt, SamplingParams())
    assert result.request.prompt_token_ids == ids_of("héllo")
    assert all(type(i) is int for i in result.request.prompt_token_ids)
    assert result.prompt == text


@pytest.mark.parametrize(
    "prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}, {"prompt": "", "cache_salt": "x"}]
)
def test_an_empty_prompt(prompt: Any) -> None:
    with pytest.raises(ValidationError, match="empty"):
        process(prompt)


@pytest.mark.parametrize("bad", [VOCAB_SIZE, 10**30, -1])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_token_id_out_of_the_vocabulary(bad: int, place: int) -> None:
    prompt = [5, 6]
    prompt.insert(place, bad)
    with pytest.raises(ValidationError, match=f"{bad}.*{VOCAB_SIZE - 1}") as caught:
        process(prompt)
    assert caught.value.parameter == "prompt"
    assert caught.value.value == bad


@pytest.mark.parametrize(
    "prompt",
    [
        5,
        None,
        2.5,
        b"bytes",
        [1.0],
        ["text"],
        [[5]],
        [5, True],
        [None],
        {},
        {"prompt": 5},
        {"prompt_token_ids": "abc"},
        {"prompt_token_ids": 5},
        {"promt": "x"},
        {5: "x", "prompt": "x"},
        {"encoder_prompt": "x", "decoder_prompt": "y"},
        {"decoder_prompt": "y"},
    ],
)
def test_what_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        process(prompt)
    assert "Traceback" not in caught.value.message


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt_embeds": object()},
        {"prompt": "x", "multi_modal_data": {"image": object()}},
    ],
)
def test_prompts_that_are_not_built(prompt: Any) -> None:
    with pytest.raises(NotImplementedFeatureError):
        process(prompt)


def test_text_that_is_not_unicode() -> None:
    with pytest.raises(ValidationError) as caught:
        process("a\ud800b")
    assert caught.value.parameter == "prompt"


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    request = process([5] * (MAX_MODEL_LEN - 1), SamplingParams(max_tokens=None))
    assert request.sampling_params.max_tokens == 1
    for length in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1):
        with pytest.raises(ValidationError, match=f"{length} tokens.*{MAX_MODEL_LEN}") as caught:
            process([5] * length)
        assert caught.value.code == "context_length_exceeded"


def test_text_far_too_long_is_refused_before_it_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("it was encoded")

    monkeypatch.setattr(tokenizer, "encode", fail)
    with pytest.raises(ValidationError, match="characters") as caught:
        process("x" * 1_000_000)
    assert caught.value.code == "context_length_exceeded"


def test_truncation_keeps_the_end() -> None:
    assert process(
        list(range(3, 60)), SamplingParams(truncate_prompt_tokens=3)
    ).prompt_token_ids == [
        57,
        58,
        59,
    ]
    long = [5] * 1000 + [6]
    kept = process(long, SamplingParams(truncate_prompt_tokens=-1)).prompt_token_ids
    assert len(kept) == MAX_MODEL_LEN - 1
    assert kept[-1] == 6
    text = process("x" * 100_000, SamplingParams(truncate_prompt_tokens=2))
    assert text.prompt_token_ids == ids_of("xx")


def test_without_a_tokenizer_only_ids_are_taken() -> None:
    bare = make(with_tokenizer=False)
    assert bare.process_inputs("id", [5], SamplingParams()).request.prompt_token_ids == [5]
    for prompt, params in (
        ("text", SamplingParams()),
        ([5], SamplingParams(stop="x")),
        ([5], SamplingParams(bad_words=["x"])),
    ):
        with pytest.raises(ValidationError, match="tokenizer"):
            bare.process_inputs("id", prompt, params)


def test_only_much_text_takes_long() -> None:
    long = "x" * (LONG_TEXT + 1)
    assert processor.takes_long(long)
    assert processor.takes_long({"prompt": long})
    for prompt in ("x", [5] * 100_000, {"prompt_token_ids": [5], "prompt": long}, {}, None, 5):
        assert not processor.takes_long(prompt)


# -- parameters -------------------------------------------------------------------------------


def test_the_callers_parameters_are_not_changed() -> None:
    params = SamplingParams(max_tokens=None, stop=["x"], bad_words=["y"])
    before = msgspec.to_builtins(params)
    sent = process([5], params).sampling_params
    assert msgspec.to_builtins(params) == before
    sent.stop.append("z")
    sent.stop_token_ids.append(1)
    assert msgspec.to_builtins(params) == before


@pytest.mark.parametrize(
    ("max_tokens", "min_tokens", "expected"),
    [
        (None, 0, (125, 0)),
        (None, 400, (125, 125)),
        (10, 5, (10, 5)),
        (125, 125, (125, 125)),
        (126, 126, (125, 125)),
        (10**9, 10**9, (125, 125)),
    ],
)
def test_lengths_are_clamped_to_the_room(
    max_tokens: int | None, min_tokens: int, expected: tuple[int, int]
) -> None:
    params = completed(max_tokens=max_tokens, min_tokens=min_tokens)
    assert (params.max_tokens, params.min_tokens) == expected


def test_ends_of_sequence_of_the_model() -> None:
    request = process([5], SamplingParams(stop_token_ids=[7]))
    assert request.eos_token_id == EOS
    assert request.sampling_params.stop_token_ids == [7, OTHER_EOS]
    assert request.sampling_params.all_stop_token_ids == {7, EOS, OTHER_EOS}
    again = completed(stop_token_ids=[OTHER_EOS])
    assert again.stop_token_ids == [OTHER_EOS]


def test_ignored_ends_still_count_for_min_tokens() -> None:
    params = completed(ignore_eos=True, stop_token_ids=[7])
    assert params.stop_token_ids == [7]
    assert params.all_stop_token_ids == {7, EOS, OTHER_EOS}


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_limit_of_logprobs(name: str) -> None:
    assert getattr(completed(**{name: 20}), name) == 20
    for count in (21, -1):
        with pytest.raises(ValidationError, match=f"{name}.*20.*{count}") as caught:
            completed(**{name: count})
        assert caught.value.parameter == name
    everything = make(max_logprobs=-1)
    everything.process_inputs("id", [5], SamplingParams(**{name: -1}))
    make(max_logprobs=VOCAB_SIZE).process_inputs("id", [5], SamplingParams(**{name: -1}))
    with pytest.raises(ValidationError, match=name):
        make(max_logprobs=0).process_inputs("id", [5], SamplingParams(**{name: 1}))


@pytest.mark.parametrize("bad", [VOCAB_SIZE, -1])
@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_ids_in_parameters(name: str, bad: int) -> None:
    value: Any = {bad: 1.0} if name == "logit_bias" else [5, bad]
    with pytest.raises(ValidationError, match=f"{name}.*{bad}.*{VOCAB_SIZE - 1}") as caught:
        completed(**{name: value})
    assert caught.value.parameter == name
    good: Any = {VOCAB_SIZE - 1: 1.0} if name == "logit_bias" else [0, VOCAB_SIZE - 1]
    completed(**{name: good})


def test_number_of_answers() -> None:
    assert completed(n=MAX_N).n == MAX_N
    with pytest.raises(ValidationError, match=rf"n must be at most {MAX_N}, got {MAX_N + 1}"):
        completed(n=MAX_N + 1)


def test_bad_words_are_encoded_with_and_without_a_space() -> None:
    params = completed(bad_words=["ab", " c"])
    assert params.bad_words_token_ids == [
        ids_of("ab"),
        ids_of(" ab"),
        ids_of("c"),
        ids_of(" c"),
    ]
    for bad in ("", "  ", 5):
        with pytest.raises(ValidationError, match="bad_words"):
            completed(bad_words=[bad])


def test_priorities() -> None:
    with pytest.raises(ValidationError, match="scheduling_policy=priority") as caught:
        process([5], priority=1)
    assert caught.value.parameter == "priority"
    ranked = make(policy="priority")
    request = ranked.process_inputs("id", [5], SamplingParams(), priority=-3).request
    assert request.priority == -3
    for bad in (1.5, "high", True, None, 2**63):
        with pytest.raises(ValidationError, match="priority"):
            ranked.process_inputs("id", [5], SamplingParams(), priority=bad)  # type: ignore[arg-type]


def test_a_form_of_the_output_is_checked_and_made_text() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = StructuredOutputsParams(json=schema)
    made = completed(structured_outputs=form).structured_outputs
    assert made is not None
    assert isinstance(made.json, str)
    assert json.loads(made.json) == schema
    assert form.json is schema, "the caller's own is not changed"
    with pytest.raises(ValidationError, match="unclosed group") as refused:
        completed(structured_outputs=StructuredOutputsParams(regex="(a"))
    assert refused.value.parameter == "structured_outputs.regex"
    for name, value in (("min_tokens", 3), ("allowed_token_ids", [5])):
        with pytest.raises(ValidationError, match="cannot be combined") as refused:
            completed(structured_outputs=form, **{name: value})
        assert refused.value.parameter == name


def test_what_is_not_built() -> None:
    with pytest.raises(NotImplementedFeatureError, match="LoRA"):
        process([5], lora_request=object())


def test_a_model_is_not_asked_for_the_other_kind() -> None:
    with pytest.raises(ValidationError, match="runner=pooling") as refused:
        process([5], PoolingParams())
    assert refused.value.code == "unsupported_task"
    with pytest.raises(ValidationError, match="embed, token_embed") as refused:
        pooler().process_inputs("id", [5], SamplingParams())
    assert refused.value.code == "unsupported_task"


def test_parameters_of_another_type() -> None:
    for params in ({"temperature": 1}, "greedy", 3):
        with pytest.raises(ValidationError, match="SamplingParams"):
            process([5], params)


@pytest.mark.parametrize("salt", ["", 5, ["x"]])
def test_a_bad_salt(salt: Any) -> None:
    with pytest.raises(ValidationError, match="cache_salt"):
        process([5], cache_salt=salt)
    with pytest.raises(ValidationError, match="cache_salt"):
        process({"prompt": "x", "cache_salt": salt})


def test_salt_of_prompt_and_call() -> None:
    assert process({"prompt": "x", "cache_salt": "a"}).cache_salt == "a"
    assert process({"prompt": "x", "cache_salt": "a"}, cache_salt="b").cache_salt == "b"
    assert process("x").cache_salt is None


@pytest.mark.parametrize("request_id", ["", None, 5])
def test_a_bad_request_id(request_id: Any) -> None:
    with pytest.raises(ValidationError, match="request_id"):
        processor.process_inputs(request_id, [5], SamplingParams())


def test_data_parallel_rank() -> None:
    process([5], data_parallel_rank=0)
    with pytest.raises(ValidationError, match="data_parallel_rank"):
        process([5], data_parallel_rank=1)


def test_a_long_value_is_not_repeated_whole() -> None:
    with pytest.raises(ValidationError) as caught:
        process({"x" * 10_000: 1})
    assert len(caught.value.message) < 300


# -- ids --------------------------------------------------------------------------------------


def test_internal_ids_differ_for_equal_names() -> None:
    requests = [process([5]) for _ in range(100)]
    internal = {assign_request_id(r) for r in requests}
    assert len(internal) == 100
    assert {r.external_req_id for r in requests} == {"id"}
    assert all(r.request_id.startswith("id-") and len(r.request_id) == 11 for r in requests)


def test_an_id_is_assigned_once() -> None:
    request = process([5])
    assign_request_id(request)
    with pytest.raises(AssertionError):
        assign_request_id(request)


def test_a_token_id_of_thousands_of_digits_is_refused_like_any_other() -> None:
    with pytest.raises(ValidationError, match="has token id of many digits"):
        make().process_inputs("a", [10**5000], SamplingParams())


# -- pooling ------------------------------------------------------------------------------------


def pooler(**fields: Any) -> InputProcessor:
    """A processor for a model that embeds in 32 dimensions, or as `fields` of its pooling say."""
    tasks = fields.pop("tasks", ("embed", "token_embed"))
    config = JubakoConfig().replace(
        model_config={"runner": "pooling", "supported_tasks": tasks},
        pooler_config={"embedding_size": 32, **fields},
    )
    return InputProcessor(config, ready, tokenizer)


def pooled(prompt: Any, params: PoolingParams, **fields: Any) -> Any:
    return pooler(**fields).process_inputs("id", prompt, params).request


def test_a_prompt_to_pool_may_fill_the_context() -> None:
    request = pooled([5] * MAX_MODEL_LEN, PoolingParams(task="embed"))
    assert len(request.prompt_token_ids) == MAX_MODEL_LEN
    assert request.sampling_params is None
    with pytest.raises(ValidationError, match=str(MAX_MODEL_LEN)) as refused:
        pooled([5] * (MAX_MODEL_LEN + 1), PoolingParams(task="embed"))
    assert refused.value.code == "context_length_exceeded"


def test_truncation_of_a_prompt_to_pool_keeps_its_beginning() -> None:
    ids = list(range(5, 25))
    cut = pooled(ids, PoolingParams(task="embed", truncate_prompt_tokens=4))
    assert cut.prompt_token_ids == ids[:4]
    whole = pooled([5] * 1000, PoolingParams(task="embed", truncate_prompt_tokens=-1))
    assert len(whole.prompt_token_ids) == MAX_MODEL_LEN
    for bad in (0, -2, MAX_MODEL_LEN + 1, True, 1.0):
        with pytest.raises(ValidationError, match="truncate_prompt_tokens"):
            pooled(ids, PoolingParams(truncate_prompt_tokens=bad))  # type: ignore[arg-type]


def test_the_task_is_by_token_unless_one_is_named() -> None:
    given = PoolingParams()
    request = pooled([5], given)
    assert request.pooling_params.task == "token_embed"
    assert given.task is None
    assert pooled([5], given, tasks=("classify",)).pooling_params.task == "classify"
    for task, code in (("classify", "unsupported_task"), ("sing", "invalid_value")):
        with pytest.raises(ValidationError, match=task) as refused:
            pooled([5], PoolingParams(task=task))
        assert refused.value.code == code


def test_tasks_by_token_compute_every_token() -> None:
    assert pooled([5], PoolingParams()).pooling_params.skip_reading_prefix_cache is True
    assert not pooled([5], PoolingParams(task="embed")).pooling_params.skip_reading_prefix_cache


@pytest.mark.parametrize(
    ("params", "fields", "match"),
    [
        ({"dimensions": 8}, {}, "not trained"),
        ({"dimensions": 33}, {"is_matryoshka": True}, "1 to 32"),
        ({"dimensions": 0}, {"is_matryoshka": True}, "1 to 32"),
        ({"dimensions": 9}, {"is_matryoshka": True, "matryoshka_dimensions": (8,)}, "one of 8"),
        ({"dimensions": 8}, {"tasks": ("classify",)}, "for embeddings"),
        ({"use_activation": 1}, {}, "true or false"),
        ({"step_tag_id": "x"}, {}, "step_tag_id"),
        ({"returned_token_ids": [0]}, {}, "with scores"),
        ({"returned_token_ids": [2]}, {"tasks": ("token_classify",), "num_labels": 2}, "0 to 1"),
    ],
    ids=str,
)
def test_pooling_parameters_that_do_not_fit_the_model(params: Any, fields: Any, match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        pooled([5], PoolingParams(**params), **fields)


def test_all_dimensions_may_always_be_asked_for() -> None:
    assert pooled([5], PoolingParams(task="embed", dimensions=32)).pooling_params.dimensions == 32
