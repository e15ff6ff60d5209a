"""What a reader gets does not depend on when it reads, how it asks, or who else is served."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jubako.engine.messages import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from jubako.errors import EngineDeadError
from jubako.frontend.logprobs import TokenTexts
from jubako.frontend.output_collector import RequestOutputCollector
from jubako.frontend.output_processor import OutputProcessor
from jubako.frontend.stats import IterationStats, TotalsLogger
from jubako.outputs import CompletionOutput, RequestOutput
from jubako.sampling_params import RequestOutputKind as Kind
from jubako.scheduler.engine_output import EngineCoreEventType, SchedulerStats
from tests.engine.fakes import EOS
from tests.frontend.driver import BYTE, as_logprobs, ids_of, outputs, request, tokenizer


class Reader:
    """Reads a collector and keeps what a client would know."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.collector = RequestOutputCollector(kind)
        self.reads: list[RequestOutput] = []
        self.sizes: list[int] = []
        self.prompt_logprobs: list[Any] = []
        self.answers: dict[int, CompletionOutput] = {}

    def read(self) -> None:
        output = self.collector.get_nowait()
        if output is None:
            return
        assert not (self.reads and self.reads[-1].finished), "an output after the last"
        self.reads.append(output)
        self.sizes.append(sum(len(c.token_ids) for c in output.outputs))
        if output.prompt_logprobs is not None:
            self.prompt_logprobs.append(output.prompt_logprobs)
        for completion in output.outputs:
            known = self.answers.get(completion.index)
            if known is not None:
                assert known.finish_reason is None, "an answer after its end"
            if completion.logprobs is not None:
                assert len(completion.logprobs) == len(completion.token_ids)
            if known is None or self.kind is not Kind.DELTA:
                self.answers[completion.index] = completion
                continue
            known.text += completion.text
            known.token_ids += completion.token_ids
            if completion.logprobs is not None:
                known.logprobs = [*(known.logprobs or []), *completion.logprobs]
            known.cumulative_logprob = completion.cumulative_logprob
            known.finish_reason = completion.finish_reason
            known.stop_reason = completion.stop_reason

    @property
    def finished(self) -> bool:
        return bool(self.reads) and self.reads[-1].finished


def as_tuple(c: CompletionOutput) -> tuple[Any, ...]:
    return (
        c.index,
        c.text,
        c.token_ids,
        c.logprobs,
        c.cumulative_logprob,
        c.finish_reason,
        c.stop_reason,
    )


def run(
    kind: Kind,
    answers: Sequence[Sequence[EngineCoreOutput]],
    *,
    schedule: Sequence[bool] = (),
    stream_interval: int = 1,
    **options: Any,
) -> Reader:
    """Feed the outputs of the answers round robin; after each, read if `schedule` says so."""
    processor = OutputProcessor(tokenizer, stream_interval=stream_interval)
    reader = Reader(kind)
    made = request(output_kind=kind, external="caller", n=len(answers), **options)
    children = processor.add_request(made, "prompt", reader.collector)
    step = 0
    queues = [list(a) for a in answers]
    while any(queues):
        for child, queue in zip(children, queues):
            if queue:
                output = queue.pop(0)
                output.request_id = child.request_id
                processor.process_outputs([output], float(step))
                if step >= len(schedule) or schedule[step]:
                    reader.read()
                step += 1
    reader.read()
    assert processor.num_unfinished_requests == 0
    assert processor.num_unfinished_tokens == 0
    return reader


texts = st.text(alphabet="abcxy é世🙂\u0301", max_size=25).filter(bool)


@settings(max_examples=150, deadline=None)
@given(
    answers=st.lists(texts, min_size=1, max_size=3),
    cut=st.integers(0, 3),
    sizes=st.lists(st.integers(1, 4), max_size=8),
    schedule=st.lists(st.booleans(), max_size=60),
    stop=st.lists(st.text(alphabet="abcxy é", min_size=1, max_size=3), max_size=2),
    interval=st.integers(1, 4),
    num_logprobs=st.none() | st.integers(0, 3),
    num_prompt_logprobs=st.none() | st.integers(0, 2),
    include=st.booleans(),
)
def test_every_kind_and_every_schedule_gives_the_same(
    answers: list[str],
    cut: int,
    sizes: list[int],
    schedule: list[bool],
    stop: list[str],
    interval: int,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    include: bool,
) -> None:
    prompt = ids_of("prompt")

    def feed() -> list[list[EngineCoreOutput]]:
        found = []
        for index, text in enumerate(answers):
            # The last characters may be cut in the middle.
            ids = ids_of(text)
            ids = ids[: max(1, len(ids) - cut)]
            wants_prompt = num_prompt_logprobs if index == 0 else None
            found.append(
                outputs(
                    "?",
                    ids,
                    sizes,
                    num_logprobs=num_logprobs,
                    num_prompt_logprobs=wants_prompt,
                    prompt=prompt,
                )
            )
        return found

    options: dict[str, Any] = {
        "stop": stop,
        "logprobs": num_logprobs,
        "prompt_logprobs": num_prompt_logprobs,
        "include_stop_str_in_output": include,
        "prompt": prompt,
    }
    final = run(Kind.FINAL_ONLY, feed(), **options)
    assert len(final.reads) == 1
    assert sorted(final.answers) == list(range(len(answers)))
    assert list(final.answers) == sorted(final.answers)
    expected = {i: as_tuple(c) for i, c in final.answers.items()}
    for kind in (Kind.DELTA, Kind.CUMULATIVE):
        for interval_now in {1, interval}:
            reader = run(kind, feed(), schedule=schedule, stream_interval=interval_now, **options)
            assert reader.finished
            assert {i: as_tuple(c) for i, c in reader.answers.items()} == expected
            if num_prompt_logprobs is None:
                assert reader.prompt_logprobs == []
            elif kind is Kind.DELTA:
                assert reader.prompt_logprobs == final.prompt_logprobs
    if num_prompt_logprobs is not None:
        (only,) = final.prompt_logprobs
        assert len(only) == len(prompt)
        assert only[0] is None
    for completion in final.answers.values():
        for word in stop:
            if not include:
                assert word not in completion.text


# -- streaming --------------------------------------------------------------------------------


def test_interval_between_outputs() -> None:
    for kind in (Kind.DELTA, Kind.CUMULATIVE):
        reader = run(kind, [outputs("?", ids_of("abcdefgh"))], stream_interval=3)
        assert reader.sizes == ([1, 3, 3, 1] if kind is Kind.DELTA else [1, 4, 7, 8])


def test_earlier_outputs_do_not_change_later() -> None:
    processor = OutputProcessor(tokenizer)
    reader = RequestOutputCollector(Kind.CUMULATIVE)
    processor.add_request(request(output_kind=Kind.CUMULATIVE, logprobs=0), None, reader)
    seen = []
    for output in outputs("r", ids_of("abc"), num_logprobs=0):
        processor.process_outputs([output], 0.0)
        seen.append(reader.get_nowait())
    assert [o.outputs[0].text for o in seen if o] == ["a", "ab", "abc"]
    assert [len(o.outputs[0].token_ids) for o in seen if o] == [1, 2, 3]
    assert [len(o.outputs[0].logprobs or ()) for o in seen if o] == [1, 2, 3]


def test_who_does_not_read_costs_one_output() -> None:
    collector = RequestOutputCollector(Kind.DELTA)
    processor = OutputProcessor(tokenizer)
    processor.add_request(request(output_kind=Kind.DELTA), None, collector)
    for output in outputs("r", ids_of("abcdef")):
        processor.process_outputs([output], 0.0)
    only = collector.get_nowait()
    assert only is not None
    assert only.outputs[0].text == "abcdef"
    assert only.finished
    assert collector.get_nowait() is None


async def test_a_reader_waits_for_the_next_output() -> None:
    collector = RequestOutputCollector(Kind.DELTA)
    processor = OutputProcessor(tokenizer)
    processor.add_request(request(output_kind=Kind.DELTA), None, collector)
    waiting = asyncio.ensure_future(collector.get())
    await asyncio.sleep(0)
    assert not waiting.done()
    processor.process_outputs(outputs("r", ids_of("a")), 0.0)
    assert (await waiting).outputs[0].text == "a"


async def test_an_error_replaces_what_is_there_and_stays() -> None:
    collector = RequestOutputCollector(Kind.DELTA)
    processor = OutputProcessor(tokenizer)
    processor.add_request(request(output_kind=Kind.DELTA), None, collector)
    processor.process_outputs(outputs("r", ids_of("ab"), reason=None), 0.0)
    processor.propagate_error(EngineDeadError())
    assert not processor.has_unfinished_requests()
    assert processor.num_unfinished_tokens == 0
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            await collector.get()


# -- ends -------------------------------------------------------------------------------------


def finish(made: list[EngineCoreOutput], **options: Any) -> tuple[RequestOutput, list[str]]:
    """The last output without a collector, and what the core must abort."""
    processor = OutputProcessor(tokenizer)
    processor.add_request(request(output_kind=Kind.FINAL_ONLY, **options), "prompt")
    last = None
    to_abort: list[str] = []
    for output in made:
        processed = processor.process_outputs([output], 0.0)
        last = processed.request_outputs[0] if processed.request_outputs else last
        to_abort += processed.reqs_to_abort
    assert last is not None
    return last, to_abort


def test_a_stop_string_ends_the_request_in_the_core() -> None:
    made = outputs("r", ids_of("abSTOPcd"), reason=None)
    last, to_abort = finish(made, stop=["STOP"])
    assert to_abort == ["r"]
    assert last.outputs[0].text == "ab"
    assert last.outputs[0].finish_reason == "stop"
    assert last.outputs[0].stop_reason == "STOP"
    assert last.outputs[0].token_ids == ids_of("abSTOP")


def test_the_core_is_not_told_to_end_what_it_ended() -> None:
    made = outputs("r", ids_of("abS"), reason=FinishReason.LENGTH)
    last, to_abort = finish(made, stop=["S"])
    assert to_abort == []
    assert last.outputs[0].stop_reason == "S"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_in_the_ids_and_not_in_the_text(include: bool) -> None:
    made = outputs("r", ids_of("abc"), reason=FinishReason.STOP)
    made[-1].stop_reason = BYTE + ord("c")
    last, _ = finish(made, include_stop_str_in_output=include)
    assert last.outputs[0].text == ("abc" if include else "ab")
    assert last.outputs[0].token_ids == ids_of("abc")
    assert last.outputs[0].stop_reason == BYTE + ord("c")


def test_an_end_of_sequence_has_no_stop_reason() -> None:
    last, _ = finish(outputs("r", [*ids_of("ab"), EOS], reason=FinishReason.STOP))
    assert last.outputs[0].text == "ab"
    assert last.outputs[0].finish_reason == "stop"
    assert last.outputs[0].stop_reason is None


def test_a_failed_request_says_why() -> None:
    output = EngineCoreOutput("r", [], finish_reason=FinishReason.ERROR, error="too hot")
    last, to_abort = finish([output])
    assert last.outputs[0].finish_reason == "error"
    assert last.outputs[0].stop_reason == "too hot"
    assert to_abort == []


def test_outputs_of_unknown_requests_are_dropped() -> None:
    processor = OutputProcessor(tokenizer)
    assert processor.process_outputs(outputs("who", [5]), 0.0) == ([], [])


def test_an_unfinished_character_at_the_end_is_not_lost() -> None:
    last, _ = finish(outputs("r", ids_of("aé")[:-1]))
    assert last.outputs[0].text == "a\ufffd"


# -- aborts -----------------------------------------------------------------------------------


def open_one(
    processor: OutputProcessor, name: str, external: str, n: int = 1, kind: Kind = Kind.DELTA
) -> tuple[list[str], RequestOutputCollector]:
    collector = RequestOutputCollector(kind)
    made: list[EngineCoreRequest] = processor.add_request(
        request(name, external=external, n=n, output_kind=kind, logprobs=0), None, collector
    )
    return [r.request_id for r in made], collector


def test_an_external_id_stands_for_all_its_requests() -> None:
    processor = OutputProcessor(tokenizer)
    first, first_reader = open_one(processor, "a-1", "a")
    second, second_reader = open_one(processor, "a-2", "a", n=2)
    other, other_reader = open_one(processor, "b-1", "b")
    assert processor.num_unfinished_requests == 4
    assert processor.abort_requests(["a", "unknown"], internal=False) == [*first, *second]
    for reader in (first_reader, second_reader):
        last = reader.get_nowait()
        assert last is not None
        assert last.finished
        assert {c.finish_reason for c in last.outputs} == {"abort"}
    assert other_reader.get_nowait() is None
    assert processor.abort_requests(["a"], internal=False) == []
    assert processor.abort_requests(other, internal=True) == other
    assert not processor.has_unfinished_requests()


def test_an_internal_id_of_a_parent_stands_for_its_children() -> None:
    processor = OutputProcessor(tokenizer)
    children, reader = open_one(processor, "p", "x", n=3, kind=Kind.FINAL_ONLY)
    made = outputs(children[1], ids_of("ab"))
    for output in made:
        processor.process_outputs([output], 0.0)
    assert reader.get_nowait() is None
    assert processor.abort_requests(["p"], internal=True) == [children[0], children[2]]
    last = reader.get_nowait()
    assert last is not None
    assert [c.finish_reason for c in last.outputs] == ["abort", "length", "abort"]
    assert processor.abort_requests(["p"], internal=True) == []


def test_an_abort_repeats_nothing() -> None:
    processor = OutputProcessor(tokenizer)
    ids, reader = open_one(processor, "a", "a")
    processor.process_outputs(outputs("a", ids_of("abc"), [3], None, num_logprobs=0), 0.0)
    first = reader.get_nowait()
    assert first is not None
    assert len(first.outputs[0].logprobs or ()) == 3
    processor.abort_requests(ids, internal=True)
    last = reader.get_nowait()
    assert last is not None
    assert last.outputs[0].token_ids == []
    assert last.outputs[0].logprobs == []
    assert last.outputs[0].text == ""


def test_late_outputs_of_aborted_requests_are_dropped() -> None:
    processor = OutputProcessor(tokenizer)
    ids, reader = open_one(processor, "a", "a")
    processor.abort_requests(ids, internal=True)
    assert processor.process_outputs(outputs("a", [5]), 0.0) == ([], [])
    last = reader.get_nowait()
    assert last is not None
    assert last.finished
    assert reader.get_nowait() is None


def test_a_failed_opening_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = OutputProcessor(tokenizer)
    opened = processor._open
    calls: list[int] = []

    def fail_at_the_second(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError
        opened(*args)

    monkeypatch.setattr(processor, "_open", fail_at_the_second)
    with pytest.raises(RuntimeError):
        processor.add_request(request(n=3), None)
    assert not processor.has_unfinished_requests()
    assert processor.num_unfinished_tokens == 0
    assert processor._parents == processor._by_external_id == {}


# -- many answers -----------------------------------------------------------------------------


def test_children_have_their_own_seeds_and_no_more_of_the_prompt_than_needed() -> None:
    processor = OutputProcessor(tokenizer)
    made = request("p", n=3, seed=40, prompt_logprobs=1, external="x")
    children = processor.add_request(made, None)
    params = [c.sampling_params for c in children]
    assert [p.seed for p in params if p] == [40, 41, 42]
    assert [p.n for p in params if p] == [1, 1, 1]
    assert [p.prompt_logprobs for p in params if p] == [1, None, None]
    assert [p.skip_reading_prefix_cache for p in params if p] == [True, False, False]
    assert [c.request_id for c in children] == ["0_p", "1_p", "2_p"]
    assert {c.external_req_id for c in children} == {"x"}
    # -1 stands for no seed, and no child may end up with it.
    edges = [
        processor.add_request(request(f"s{seed}", n=2, seed=seed), None) for seed in (-2, 2**64 - 1)
    ]
    assert [[c.sampling_params.seed for c in pair if c.sampling_params] for pair in edges] == [
        [2**64 - 2, 2**64 - 1],
        [2**64 - 1, 0],
    ]
    unseeded = processor.add_request(request("q", n=2), None)
    assert [c.sampling_params.seed for c in unseeded if c.sampling_params] == [None, None]


def test_hits_of_the_children_among_themselves_are_not_the_callers() -> None:
    processor = OutputProcessor(tokenizer)
    children = processor.add_request(request("p", n=2, output_kind=Kind.FINAL_ONLY), None)
    last: list[RequestOutput] = []
    for child, hits in zip(children, (4, 16)):
        (output,) = outputs(child.request_id, [5])
        output.num_cached_tokens = hits
        last += processor.process_outputs([output], 0.0).request_outputs
    assert [o.num_cached_tokens for o in last] == [4]


def test_answers_that_end_at_different_times() -> None:
    answers = [outputs("?", ids_of(t)) for t in ("abcd", "x", "yz")]
    reader = run(Kind.DELTA, answers)
    assert [c.text for c in reader.answers.values()] == ["abcd", "x", "yz"]
    assert [r.finished for r in reader.reads].count(True) == 1


# -- logprobs ---------------------------------------------------------------------------------


def test_logprobs_by_position() -> None:
    (output,) = outputs("r", ids_of("a"), num_logprobs=2)
    last, _ = finish([output], logprobs=2)
    answer = last.outputs[0]
    (position,) = answer.logprobs or ()
    a = BYTE + ord("a")
    assert list(position) == [a, a + 1, a + 2]
    assert [p.rank for p in position.values()] == [2, 1, 2]
    assert [p.decoded_token for p in position.values()] == ["a", "b", "c"]
    assert answer.cumulative_logprob == position[a].logprob == -0.5


def test_the_chosen_token_is_listed_once() -> None:
    output = EngineCoreOutput(
        "r",
        [50],
        new_logprobs=as_logprobs([([50, 51, 50], [-2.0, -0.1, -2.0], 2)]),
        finish_reason=FinishReason.LENGTH,
    )
    last, _ = finish([output], logprobs=2)
    (position,) = last.outputs[0].logprobs or ()
    assert [(t, p.rank) for t, p in position.items()] == [(50, 2), (51, 1)]


def test_text_of_tokens_that_are_parts_of_characters() -> None:
    texts_of = TokenTexts(tokenizer)
    smile = ids_of("🙂")
    assert [texts_of.text_after(t, smile[:i]) for i, t in enumerate(smile)] == ["", "", "", "🙂"]
    assert texts_of.text_after(smile[-1], []) == ""
    assert texts_of.text_after(ids_of("é")[1], ids_of("xé")[:-1]) == "é"
    assert texts_of.text_after(ids_of("a")[0], smile[:2]) == "a"
    assert texts_of.text_after(ids_of("é")[1], ids_of("xyz")) == ""
    assert texts_of.text_of(260) == " word260"
    assert texts_of.text_of(EOS) == "<eos>"


@given(st.text(alphabet="aé世🙂", min_size=1, max_size=10))
@settings(max_examples=50, deadline=None)
def test_token_texts_together_are_the_text(text: str) -> None:
    ids = ids_of(text)
    texts_of = TokenTexts(tokenizer)
    assert "".join(texts_of.text_after(t, ids[:i]) for i, t in enumerate(ids)) == text


def test_a_character_begun_by_the_prompt() -> None:
    smile = ids_of("🙂")
    prompt = smile[:2]
    made = outputs("r", smile[2:], num_logprobs=0)
    last, _ = finish(made, logprobs=0, prompt=prompt)
    decoded = [next(iter(p.values())).decoded_token for p in last.outputs[0].logprobs or ()]
    assert decoded == ["", "🙂"]


def test_prompt_logprobs_of_a_single_token() -> None:
    last, _ = finish(outputs("r", ids_of("a")), prompt=[5], prompt_logprobs=1)
    assert last.prompt_logprobs == [None]


def test_prompt_logprobs_name_the_prompts_tokens() -> None:
    prompt = ids_of("xé")
    made = outputs("r", ids_of("a"), num_prompt_logprobs=0, prompt=prompt)
    last, _ = finish(made, prompt=prompt, prompt_logprobs=0)
    found = [p and next(iter(p.values())).decoded_token for p in last.prompt_logprobs or ()]
    assert found == [None, "", "é"]


def test_without_logprobs_there_are_none() -> None:
    last, _ = finish(outputs("r", ids_of("a"), num_logprobs=2))
    assert last.outputs[0].logprobs is None
    assert last.outputs[0].cumulative_logprob is None
    assert last.prompt_logprobs is None


# -- statistics -------------------------------------------------------------------------------


def test_statistics_of_a_request() -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request(request(output_kind=Kind.FINAL_ONLY), None)
    first = EngineCoreOutput("r", [5], num_cached_tokens=4)
    first.events = [
        EngineCoreEvent(EngineCoreEventType.QUEUED, 10.0),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, 11.0),
        EngineCoreEvent(EngineCoreEventType.PREEMPTED, 11.5),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, 12.0),
    ]
    step1, step2, step3 = IterationStats(), IterationStats(), IterationStats()
    processor.process_outputs([first], 13.0, step1)
    processor.process_outputs([EngineCoreOutput("r", [6, 7])], 15.0, step2)
    last = EngineCoreOutput("r", [8], finish_reason=FinishReason.LENGTH)
    (output,) = processor.process_outputs([last], 19.0, step3).request_outputs
    assert (step1.num_prompt_tokens, step1.num_cached_prompt_tokens) == (6, 4)
    assert step1.num_preempted_reqs == 1
    assert len(step1.time_to_first_tokens_iter) == 1
    assert step1.inter_token_latencies_iter == []
    assert step2.inter_token_latencies_iter == [2.0]
    assert step2.num_generation_tokens == 2
    (done,) = step3.finished_requests
    assert done.queued_time == 1.0
    assert done.prefill_time == 2.0
    assert done.decode_time == 6.0
    assert done.inference_time == 8.0
    assert done.mean_time_per_output_token == 2.0
    assert (done.num_prompt_tokens, done.num_generation_tokens) == (6, 4)
    assert done.num_cached_tokens == 4
    assert done.num_preemptions == 1
    assert (step3.n_params_iter, step3.max_num_generation_tokens_iter) == ([1], [4])
    assert output.metrics is not None
    assert output.metrics.num_generation_tokens == 4
    assert output.metrics.first_token_ts == 13.0


def test_statistics_of_many_answers_count_the_request_once() -> None:
    processor = OutputProcessor(tokenizer)
    children = processor.add_request(request("p", n=2), None)
    stats = IterationStats()
    for child, text in zip(children, ("abc", "x")):
        processor.process_outputs(outputs(child.request_id, ids_of(text), [3]), 1.0, stats)
    assert stats.n_params_iter == [2]
    assert stats.max_num_generation_tokens_iter == [3]
    assert len(stats.finished_requests) == 2


def test_totals() -> None:
    totals = TotalsLogger()
    totals.record(SchedulerStats(num_running_reqs=2, num_preemptions=1), None)
    totals.record(SchedulerStats(num_running_reqs=1), IterationStats(num_generation_tokens=5))
    totals.record(None, IterationStats(num_generation_tokens=2, num_prompt_tokens=3))
    found = totals.totals()
    assert found["num_requests_running"] == 1
    assert found["num_preemptions"] == 1
    assert found["generation_tokens"] == 7
    assert found["prompt_tokens"] == 3
