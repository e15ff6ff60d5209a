"""What becomes of the core's outputs for pooling requests."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from jubako.engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from jubako.errors import EngineDeadError, ValidationError
from jubako.frontend.output_collector import RequestOutputCollector
from jubako.frontend.output_processor import OutputProcessor
from jubako.frontend.scoring import cosine, make_pairs, pair_params, scoring_kind
from jubako.frontend.stats import IterationStats
from jubako.frontend.tokenizer import _cut_longest
from jubako.outputs import EmbeddingOutput, PoolingRequestOutput, viewed
from jubako.sampling_params import PoolingParams, RequestOutputKind

DATA = np.arange(4, dtype=np.float32)


def request(request_id: str = "r-1", external: str = "r") -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[5, 6, 7],
        mm_features=None,
        sampling_params=None,
        pooling_params=PoolingParams(task="embed"),
        eos_token_id=None,
        arrival_time=1.0,
        external_req_id=external,
    )


def pooled(request_id: str = "r-1", **fields: Any) -> EngineCoreOutput:
    values: dict[str, Any] = {"pooling_output": DATA, "finish_reason": FinishReason.STOP, **fields}
    return EngineCoreOutput(request_id, [], **values)


def test_the_output_ends_the_request_and_is_counted() -> None:
    processor = OutputProcessor(None)
    processor.add_request(request(), "text")
    stats = IterationStats()
    processed = processor.process_outputs([pooled(num_cached_tokens=2)], 9.0, stats)
    (output,) = processed.request_outputs
    assert isinstance(output, PoolingRequestOutput)
    assert (output.request_id, output.finished, output.finish_reason) == ("r", True, "stop")
    assert output.outputs is not None
    assert output.outputs.data is DATA
    assert output.num_cached_tokens == 2
    assert processed.reqs_to_abort == []
    assert not processor.has_unfinished_requests()
    assert processor.num_unfinished_tokens == 0
    assert (stats.num_prompt_tokens, stats.num_cached_prompt_tokens) == (3, 2)
    assert [finished.finish_reason for finished in stats.finished_requests] == [FinishReason.STOP]


def test_an_error_of_the_core_leaves_no_data() -> None:
    processor = OutputProcessor(None)
    processor.add_request(request(), None)
    error = pooled(pooling_output=None, finish_reason=FinishReason.ERROR, error="Too long.")
    (output,) = processor.process_outputs([error], 9.0).request_outputs
    assert isinstance(output, PoolingRequestOutput)
    assert (output.outputs, output.finish_reason, output.error) == (None, "error", "Too long.")


def test_an_end_without_data_is_an_error() -> None:
    processor = OutputProcessor(None)
    processor.add_request(request(), None)
    (output,) = processor.process_outputs([pooled(pooling_output=None)], 9.0).request_outputs
    assert isinstance(output, PoolingRequestOutput)
    assert output.finish_reason == "error"


def test_an_abort_is_an_output_and_reaches_the_core() -> None:
    processor = OutputProcessor(None)
    collector = RequestOutputCollector(RequestOutputKind.FINAL_ONLY)
    processor.add_request(request(), None, collector)
    assert processor.abort_requests(["r"], internal=False) == ["r-1"]
    output = asyncio.run(collector.get())
    assert isinstance(output, PoolingRequestOutput)
    assert (output.outputs, output.finish_reason) == (None, "abort")
    # What the core had already sent comes too late.
    assert processor.process_outputs([pooled()], 9.0).request_outputs == []


def test_the_death_of_the_core_reaches_the_reader() -> None:
    processor = OutputProcessor(None)
    collector = RequestOutputCollector(RequestOutputKind.FINAL_ONLY)
    processor.add_request(request(), None, collector)
    processor.propagate_error(EngineDeadError())
    with pytest.raises(EngineDeadError):
        asyncio.run(collector.get())


def test_a_view_keeps_everything_else() -> None:
    processor = OutputProcessor(None)
    processor.add_request(request(), None)
    (output,) = processor.process_outputs([pooled()], 9.0).request_outputs
    assert isinstance(output, PoolingRequestOutput)
    view = viewed(output, EmbeddingOutput)
    assert view.outputs is not None
    assert view.outputs.embedding == [0.0, 1.0, 2.0, 3.0]
    assert view.outputs.hidden_size == 4
    for name in output.__struct_fields__:
        if name != "outputs":
            assert getattr(view, name) == getattr(output, name)


# -- pairs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "limit", "cut"),
    [
        ([5], 9, [5]),
        ([5], 3, [3]),
        ([5, 4], 9, [5, 4]),
        ([5, 4], 8, [4, 4]),
        ([5, 4], 7, [4, 3]),
        ([2, 10], 7, [2, 5]),
        ([10, 2], 7, [5, 2]),
        ([10, 10], 7, [4, 3]),
        ([3, 10], 0, [0, 0]),
        ([4, 4], 8, [4, 4]),
    ],
)
def test_the_longer_text_is_cut_first(lengths: list[int], limit: int, cut: list[int]) -> None:
    assert _cut_longest(lengths, limit) == cut


def test_pairs() -> None:
    names = ("a", "b")
    assert make_pairs("x", ["y", "z"], names) == [("x", "y"), ("x", "z")]
    assert make_pairs(["w", "x"], ["y", "z"], names) == [("w", "y"), ("x", "z")]
    for first, second in ((["w", "x"], ["y"]), ([], "x"), ("", "x"), ("x", ["y", ""])):
        with pytest.raises(ValidationError):
            make_pairs(first, second, names)


def test_the_second_segment_travels_with_the_parameters() -> None:
    params = PoolingParams(truncate_prompt_tokens=4, use_activation=False)
    paired = pair_params(params, 3)
    assert paired.extra_kwargs == {"compressed_token_type_ids": 3}
    assert (paired.task, paired.truncate_prompt_tokens) == ("score", None)
    assert params == PoolingParams(truncate_prompt_tokens=4, use_activation=False)
    assert pair_params(params, None).extra_kwargs is None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(paired), type=PoolingParams) == paired


def test_a_cosine_stays_in_its_range() -> None:
    ones = np.full(7, 0.1, dtype=np.float32)
    assert cosine(ones, ones) <= 1.0
    assert cosine(ones, -ones) >= -1.0
    assert cosine(ones, np.zeros(7)) == 0.0


def test_who_scores() -> None:
    assert scoring_kind(["classify", "score"]) == "cross encoder"
    assert scoring_kind(["embed", "token_embed"]) == "embeddings"
    with pytest.raises(ValidationError, match="token_classify"):
        scoring_kind(["token_classify"])
