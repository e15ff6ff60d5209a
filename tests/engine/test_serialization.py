"""Records come back as they were; nothing else gets in."""

from __future__ import annotations

import dataclasses
import os
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jubako.config import JubakoConfig
from jubako.engine.error_report import ErrorReport
from jubako.engine.handshake import FromCore, Hello, Init
from jubako.engine.messages import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReady,
    EngineCoreRequest,
    FinishReason,
    UtilityOutput,
)
from jubako.engine.serialization import (
    INLINE_LIMIT,
    MsgpackDecoder,
    MsgpackEncoder,
    SerializationError,
)
from jubako.engine.utility import UtilityCall
from jubako.errors import (
    ERROR_TABLE,
    ConfigError,
    EngineBusyError,
    EngineDeadError,
    JubakoError,
    ValidationError,
)
from jubako.kv_cache.metrics import PrefixCacheStats
from jubako.sampling_params import SamplingParams
from jubako.scheduler.engine_output import EngineCoreEventType, SchedulerStats
from jubako.scheduler.model_output import (
    DraftTokenIds,
    KVConnectorOutput,
    LogprobsLists,
    ModelRunnerOutput,
)
from jubako.scheduler.output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)


def same(a: Any, b: Any) -> bool:
    """Equality that looks into arrays."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(
            same(getattr(a, n), getattr(b, n)) for n in a.__struct_fields__
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def through_the_wire(record: Any, record_type: Any = None) -> Any:
    frames = [bytes(f) for f in MsgpackEncoder().encode(record)]
    return MsgpackDecoder(record_type or type(record)).decode(frames)


ids = st.lists(st.integers(0, 2**31 - 1), max_size=200)
names = st.text(max_size=20)


@st.composite
def logprobs(draw: st.DrawFn) -> LogprobsLists:
    rows, columns = draw(st.integers(0, 20)), draw(st.integers(1, 20))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return LogprobsLists(
        rng.integers(0, 1000, (rows, columns), dtype=np.int32),
        rng.standard_normal((rows, columns), dtype=np.float32),
        rng.integers(1, 9, rows, dtype=np.int32),
        draw(st.none() | st.just([0, rows])),
    )


params = st.builds(
    SamplingParams,
    n=st.integers(1, 5),
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(-5, 2**64 - 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
    stop_token_ids=ids,
    max_tokens=st.none() | st.integers(1, 100),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 300), st.floats(-100, 100)),
    extra_args=st.none() | st.dictionaries(names, names | st.integers(0, 5)),
)

requests = st.builds(
    EngineCoreRequest,
    request_id=names,
    prompt_token_ids=st.none() | ids,
    mm_features=st.none(),
    sampling_params=params,
    pooling_params=st.none(),
    eos_token_id=st.none() | st.integers(0, 9),
    arrival_time=st.floats(0, 1e10),
    cache_salt=st.none() | names,
    priority=st.integers(-(2**63), 2**63 - 1),
    trace_headers=st.none() | st.dictionaries(names, names),
    external_req_id=st.none() | names,
)

outputs = st.builds(
    EngineCoreOutputs,
    outputs=st.lists(
        st.builds(
            EngineCoreOutput,
            request_id=names,
            new_token_ids=ids,
            new_logprobs=st.none() | logprobs(),
            new_prompt_logprobs_tensors=st.none() | logprobs(),
            pooling_output=st.none() | st.just(np.arange(300.0)),
            finish_reason=st.none() | st.sampled_from(FinishReason),
            stop_reason=st.none() | st.integers(0, 9) | names,
            events=st.none()
            | st.lists(
                st.builds(
                    EngineCoreEvent,
                    type=st.sampled_from(EngineCoreEventType),
                    timestamp=st.floats(0, 1e9),
                ),
                min_size=1,
            ),
            error=st.none() | names,
        ),
        max_size=4,
    ),
    scheduler_stats=st.none()
    | st.builds(
        SchedulerStats,
        num_running_reqs=st.integers(0, 9),
        prefix_cache_stats=st.none() | st.just(PrefixCacheStats(queries=7, hits=3)),
    ),
    timestamp=st.floats(0, 1e9),
    finished_requests=st.none() | st.sets(names),
)


@settings(max_examples=60, deadline=None)
@given(requests | outputs)
def test_records_come_back_as_they_were(record: Any) -> None:
    assert same(through_the_wire(record), record)


@pytest.mark.parametrize(
    "record",
    [
        SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(
                    req_id="a",
                    prompt_token_ids=[1, 2],
                    sampling_params=SamplingParams(stop="x"),
                    block_ids=([1], [2, 3]),
                    num_computed_tokens=0,
                    seed=5,
                )
            ],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=["b"],
                resumed_req_ids={"b"},
                new_block_ids=[None],
                num_computed_tokens=[4],
                num_output_tokens=[1],
            ),
            num_scheduled_tokens={"a": 2, "b": 1},
            total_num_scheduled_tokens=3,
            finished_req_ids={"c"},
        ),
        ModelRunnerOutput(
            req_ids=["a"],
            req_id_to_index={"a": 0},
            sampled_token_ids=[[7]],
            kv_connector_output=KVConnectorOutput(finished_sending={"a"}),
        ),
        GrammarOutput(
            structured_output_request_ids=["a"], grammar_bitmask=np.ones((1, 400), np.int32)
        ),
        DraftTokenIds(["a"], [[1, 2]]),
        UtilityCall(0, 2**62, "check_health", [True, None]),
        EngineCoreOutputs(utility_output=UtilityOutput(3, None, [1, 2])),
        EngineCoreReady(
            version="1",
            model="m",
            architecture="A",
            dtype="float32",
            device="cpu",
            max_model_len=9,
            vocab_size=9,
            block_sizes=[4],
            num_gpu_blocks=2,
            kv_cache_tokens=4,
            enable_prefix_caching=True,
            max_num_seqs=1,
            max_num_batched_tokens=1,
        ),
    ],
    ids=lambda r: type(r).__name__,
)
def test_every_kind_of_record_comes_back(record: Any) -> None:
    assert same(through_the_wire(record), record)


def test_the_configuration_comes_back() -> None:
    config = JubakoConfig.from_options({"max_num_seqs": 7, "gpu_memory_utilization": 1})
    config = config.replace(model_config={"hf_config": {"a": [1, {"b": None}]}})
    init = Init(config, "llm", ["i"], ["o"])
    assert through_the_wire(init) == init


def test_messages_of_the_handshake_are_told_apart() -> None:
    for message in (Hello(3), ErrorReport("ConfigError", "no")):
        assert through_the_wire(message, FromCore) == message


def test_a_bad_option_cannot_be_smuggled_in() -> None:
    init = msgspec.to_builtins(Init(JubakoConfig(), "llm", [], []))
    init["config"]["scheduler_config"]["max_num_seqs"] = -1
    with pytest.raises(SerializationError, match="max_num_seqs"):
        MsgpackDecoder(Init).decode(msgspec.msgpack.encode(init))


def test_fields_that_a_newer_sender_adds_are_ignored() -> None:
    request = EngineCoreRequest("r", [1], None, SamplingParams(), None, None, 1.0, priority=3)
    row = msgspec.to_builtins(request)
    width = len(request.__struct_fields__)
    row += [None] * (width - len(row)) + ["new", {"x": 1}]
    row[request.__struct_fields__.index("client_index")] = 0
    row[request.__struct_fields__.index("current_wave")] = 0
    row[request.__struct_fields__.index("resumable")] = False
    row[request.__struct_fields__.index("priority")] = 3
    decoded = MsgpackDecoder(EngineCoreRequest).decode(msgspec.msgpack.encode(row))
    assert decoded == request
    stats = {**msgspec.to_builtins(SchedulerStats(num_running_reqs=2)), "new_field": 1}
    decoded_stats = MsgpackDecoder(SchedulerStats).decode(msgspec.msgpack.encode(stats))
    assert decoded_stats == SchedulerStats(num_running_reqs=2)


# -- arrays -----------------------------------------------------------------------------------


def test_large_arrays_are_not_copied_and_small_ones_have_no_frame() -> None:
    large = np.zeros(INLINE_LIMIT, np.uint8)
    small = np.zeros(INLINE_LIMIT - 1, np.uint8)
    frames = MsgpackEncoder().encode([small, large])
    assert len(frames) == 2
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), large)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (40, 30)])
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float64"])
def test_arrays_of_any_shape_and_type(shape: tuple[int, ...], dtype: str) -> None:
    array = np.ones(shape, dtype)
    assert same(through_the_wire(array, Any), array)


def test_arrays_that_are_no_block_of_memory() -> None:
    array = np.arange(4000, dtype=np.int64).reshape(50, 80)[::2, ::3].T
    assert same(through_the_wire(array, Any), array)


def test_numpy_scalars_become_numbers() -> None:
    assert through_the_wire([np.int64(3), np.float32(0.5), np.bool_(True)], Any) == [3, 0.5, True]


@pytest.mark.parametrize(
    "value",
    [np.array([object()]), np.array(["text"]), np.zeros(3, [("a", "i4")]), np.zeros(3, ">i4")],
)
def test_other_arrays_are_refused(value: Any) -> None:
    with pytest.raises(SerializationError):
        MsgpackEncoder().encode(value)


class Touch:
    """Unpickling creates the file: the classic attack."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_objects_are_refused(tmp_path: Any) -> None:
    for value in (Touch("x"), len, lambda: 0, object()):
        with pytest.raises(SerializationError):
            MsgpackEncoder().encode([value])


def test_pickles_are_not_opened(tmp_path: Any) -> None:
    target = str(tmp_path / "made")
    attack = pickle.dumps(Touch(target))
    for code in range(-1, 5):
        body = msgspec.msgpack.encode(["r", msgspec.msgpack.Ext(code, attack)])
        for kind in (EngineCoreRequest, EngineCoreOutputs, UtilityCall):
            with pytest.raises(SerializationError):
                MsgpackDecoder(kind).decode([body, attack])
    with pytest.raises(SerializationError):
        MsgpackDecoder(EngineCoreRequest).decode(attack)
    assert not os.path.exists(target)


# -- damage -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frames() -> list[bytes]:
    rows = LogprobsLists(
        np.ones((30, 4), np.int32), np.ones((30, 4), np.float32), np.ones(30, np.int32)
    )
    record = EngineCoreOutputs(outputs=[EngineCoreOutput("request", [1, 2, 3], new_logprobs=rows)])
    return [bytes(f) for f in MsgpackEncoder().encode(record)]


def test_every_truncation_is_an_error(frames: list[bytes]) -> None:
    decoder = MsgpackDecoder(EngineCoreOutputs)
    for end in range(len(frames[0])):
        with pytest.raises(SerializationError):
            decoder.decode([frames[0][:end], *frames[1:]])
    for cut in ([frames[0]], [*frames[:-1], frames[-1][:-1]], [frames[0], frames[1] + b"x"], []):
        with pytest.raises(SerializationError):
            decoder.decode(cut)
    assert decoder.decode(frames).outputs[0].request_id == "request"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_are_an_error_or_a_record(frames: list[bytes], data: st.DataObject) -> None:
    damaged = bytearray(frames[0])
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        record = MsgpackDecoder(EngineCoreOutputs).decode([bytes(damaged), *frames[1:]])
    except SerializationError:
        return
    assert isinstance(record, EngineCoreOutputs)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([EngineCoreRequest, EngineCoreOutputs, Init]))
def test_garbage_is_an_error(garbage: bytes, kind: Any) -> None:
    message = kind.__name__
    try:
        record = MsgpackDecoder(kind).decode(garbage)
    except SerializationError as error:
        message = error.message
    else:
        assert isinstance(record, kind)
    assert kind.__name__ in message


def test_deep_nesting_is_an_error() -> None:
    with pytest.raises(SerializationError):
        MsgpackDecoder(UtilityCall).decode(b"\x94\x00\x00\xa1x" + b"\x91" * 100_000 + b"\x90")


@pytest.mark.parametrize(
    "header",
    [
        ["<i4", [3], 1],
        ["<i4", [-1, -300], 1],
        ["<i4", [300], 0],
        ["<i4", [300], 9],
        ["<i4", [300], -1],
        ["|O", [300], 1],
        ["<U300", [1], 1],
        ["<i4", [2**62, 2**62], 1],
        ["<i4", "x", 1],
        ["<i4"],
        {},
    ],
    ids=repr,
)
def test_arrays_with_a_false_header_are_refused(header: Any) -> None:
    body = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, msgspec.msgpack.encode(header)))
    with pytest.raises(SerializationError):
        MsgpackDecoder(Any).decode([body, bytes(1200)])  # type: ignore[arg-type]


def test_an_array_of_another_type_than_declared_is_refused() -> None:
    wrong = LogprobsLists(
        np.ones((1, 1), np.int64),  # type: ignore[arg-type]
        np.ones((1, 1), np.float32),
        np.ones(1, np.int32),
    )
    frames = [bytes(f) for f in MsgpackEncoder().encode(wrong)]
    with pytest.raises(SerializationError):
        MsgpackDecoder(LogprobsLists).decode(frames)


# -- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        ValidationError("bad", "top_p", 3, code="context_length_exceeded"),
        ConfigError("bad", "max_model_len"),
        EngineBusyError("busy"),
        EngineDeadError(),
        JubakoError("plain"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_errors_keep_their_class_and_code(error: JubakoError) -> None:
    back = through_the_wire(ErrorReport.of(error, "unexpected")).to_error()
    assert type(back) is type(error)
    assert (back.message, back.parameter, back.code) == (
        error.message,
        error.parameter,
        error.code,
    )
    assert back.code in ERROR_TABLE


def test_a_subclass_outside_the_family_travels_as_the_nearest_member() -> None:
    assert ErrorReport.of(SerializationError("x"), "unexpected").kind == "JubakoError"


def test_an_unexpected_error_does_not_tell_its_text() -> None:
    report = ErrorReport.of(RuntimeError("/secret/path"), "The core failed.")
    assert report.to_error().message == "The core failed."


def test_a_report_of_an_unknown_kind_is_still_an_error() -> None:
    error = ErrorReport("os.system", "text", code="no such code").to_error()
    assert type(error) is JubakoError
    assert error.code == "internal_error"


def test_all_fields_of_the_configuration_are_plain_data() -> None:
    """So that it can travel: msgspec builds a decoder for it."""
    assert dataclasses.is_dataclass(JubakoConfig)
    MsgpackDecoder(JubakoConfig)
