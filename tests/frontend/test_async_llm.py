"""Many coroutines on one engine: streams, cancellation, death, draining."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop

from jubako.errors import EngineDeadError, EngineGenerateError, ValidationError
from jubako.frontend import async_llm
from jubako.frontend.async_llm import AsyncLLM
from jubako.frontend.tokenizer import LONG_TEXT
from jubako.outputs import RequestOutput
from jubako.sampling_params import RequestOutputKind as Kind
from jubako.sampling_params import SamplingParams
from tests.engine.fakes import DIE, HANG, SLOW, continuation
from tests.frontend.driver import ids_of, tokenizer

DEADLINE = 10.0


@pytest.fixture
async def engine(make_config: Any) -> AsyncIterator[AsyncLLM]:
    made = AsyncLLM.from_config(make_config())
    yield made
    made.shutdown()


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 6, "output_kind": Kind.DELTA, **options}
    )


async def collect(engine: AsyncLLM, prompt: Any, **options: Any) -> list[RequestOutput]:
    return [o async for o in engine.generate(prompt, greedy(**options))]


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [t for o in outputs for t in o.outputs[0].token_ids]


async def is_idle(engine: AsyncLLM) -> None:
    """Wait until the core holds no request."""
    async with asyncio.timeout(DEADLINE):
        while await engine._client.call_utility("get_request_counts") != (0, 0):
            pass


async def test_streams(engine: AsyncLLM) -> None:
    prompts = [[5 + i, 6, 7] * (1 + i % 9) for i in range(64)]
    results = await asyncio.gather(*(collect(engine, p, max_tokens=20) for p in prompts))
    for prompt, outputs in zip(prompts, results):
        assert tokens(outputs) == continuation(prompt, 20)
        assert [o.finished for o in outputs].count(True) == 1
    assert engine.num_unfinished_requests == 0
    assert engine.num_unfinished_tokens == 0
    assert engine.get_metrics()["generation_tokens"] == 64 * 20


async def test_text_kinds_and_ids(engine: AsyncLLM) -> None:
    expected = continuation(ids_of("hello"), 6)
    final = await collect(engine, "hello", output_kind=Kind.FINAL_ONLY)
    assert len(final) == 1
    assert final[0].outputs[0].text == tokenizer.decode(expected)
    cumulative = [o async for o in engine.generate({"prompt": "hello"}, None, "mine")]
    assert {o.request_id for o in cumulative} == {"mine"}
    assert len(cumulative[-1].outputs[0].token_ids) == 16


async def test_a_slow_reader_loses_nothing(engine: AsyncLLM) -> None:
    random.seed(1)

    async def slowly(prompt: list[int]) -> list[RequestOutput]:
        outputs = []
        async for output in engine.generate(prompt, greedy(max_tokens=40)):
            outputs.append(output)
            for _ in range(random.randrange(20)):
                await asyncio.sleep(0)
        return outputs

    results = await asyncio.gather(*(slowly([5 + i]) for i in range(20)))
    for i, outputs in enumerate(results):
        assert tokens(outputs) == continuation([5 + i], 40)


async def test_equal_ids(engine: AsyncLLM) -> None:
    async def one(prompt: list[int]) -> list[int]:
        return tokens([o async for o in engine.generate(prompt, greedy(), "same")])

    results = await asyncio.gather(one([5]), one([6]))
    assert list(results) == [continuation([5], 6), continuation([6], 6)]


async def test_several_answers(engine: AsyncLLM) -> None:
    (output,) = await collect(engine, [5, 6], n=3, output_kind=Kind.FINAL_ONLY)
    assert [c.token_ids for c in output.outputs] == [continuation([5, 6], 6)] * 3


async def test_long_text_is_encoded_elsewhere(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "x" * (LONG_TEXT + 1)
    outputs = await collect(engine, text, truncate_prompt_tokens=5)
    assert outputs[0].prompt_token_ids == ids_of("xxxxx")
    with pytest.raises(ValidationError, match="context"):
        await collect(engine, text)


async def test_bad_requests_leave_others_alone(engine: AsyncLLM) -> None:
    results = await asyncio.gather(
        collect(engine, [5]),
        collect(engine, []),
        collect(engine, [5] * 500),
        collect(engine, [6]),
        return_exceptions=True,
    )
    assert isinstance(results[1], ValidationError)
    assert isinstance(results[2], ValidationError)
    assert tokens(results[0]) == continuation([5], 6)  # type: ignore[arg-type]
    assert tokens(results[3]) == continuation([6], 6)  # type: ignore[arg-type]
    assert engine.num_unfinished_requests == 0


# -- cancellation -----------------------------------------------------------------------------


async def test_cancelling_the_reader_aborts(engine: AsyncLLM) -> None:
    started = asyncio.Event()

    async def read() -> None:
        async for _ in engine.generate([5], greedy(max_tokens=None)):
            started.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(read())
    other = asyncio.ensure_future(collect(engine, [6], max_tokens=30))
    await started.wait()
    assert engine.num_unfinished_tokens >= 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tokens(await other) == continuation([6], 30)
    assert engine.num_unfinished_requests == 0
    await is_idle(engine)
    assert await engine.reset_prefix_cache()


async def test_closing_the_generator_aborts(engine: AsyncLLM) -> None:
    stream = engine.generate([5], greedy(max_tokens=None, n=2))
    await anext(stream)
    await stream.aclose()
    assert engine.num_unfinished_requests == 0
    await is_idle(engine)


async def test_leaving_the_loop_aborts(engine: AsyncLLM) -> None:
    async for _ in engine.generate([5], greedy(max_tokens=None)):
        break
    async with asyncio.timeout(DEADLINE):
        while engine.num_unfinished_requests:
            await asyncio.sleep(0)
    await is_idle(engine)


async def test_abort_by_the_callers_id(engine: AsyncLLM) -> None:
    outputs = []
    async for output in engine.generate([5], greedy(max_tokens=None), "mine"):
        outputs.append(output)
        await engine.abort("mine")
        await engine.abort(["mine", "unknown"])
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert engine.get_metrics()["request_success"]["abort"] == 1
    assert tokens(outputs) == continuation([5], len(tokens(outputs)))
    await is_idle(engine)


async def test_half_of_many_are_cancelled(engine: AsyncLLM) -> None:
    async def read_once(prompt: list[int]) -> None:
        async for _ in engine.generate(prompt, greedy(max_tokens=None)):
            started.release()
            await asyncio.Event().wait()

    started = asyncio.Semaphore(0)
    prompts = [[5 + i] * 9 for i in range(64)]
    cancelled = [asyncio.ensure_future(read_once(p)) for p in prompts[::2]]
    kept = [asyncio.ensure_future(collect(engine, p, max_tokens=60)) for p in prompts[1::2]]
    for _ in cancelled:
        await started.acquire()
    for reader in cancelled:
        reader.cancel()
    for result in await asyncio.gather(*cancelled, return_exceptions=True):
        assert isinstance(result, asyncio.CancelledError)
    for prompt, outputs in zip(prompts[1::2], await asyncio.gather(*kept)):
        assert tokens(outputs) == continuation(prompt, 60)
    assert engine.num_unfinished_requests == 0
    await is_idle(engine)
    async with asyncio.timeout(DEADLINE):
        while engine.get_metrics()["kv_cache_usage_perc"] > 0:
            await asyncio.sleep(0)


async def check_for_ever(engine: AsyncLLM) -> None:
    while True:
        await engine.check_health(timeout=0.1)


# -- death ------------------------------------------------------------------------------------


async def test_death_ends_every_stream(engine: AsyncLLM) -> None:
    assert not engine.errored
    assert engine.dead_error is None
    readers = [
        asyncio.ensure_future(collect(engine, [HANG] if i else [5], n=1 + i % 2)) for i in range(8)
    ]
    health = asyncio.ensure_future(engine.check_health(timeout=1000))
    await asyncio.sleep(0.1)
    os.kill(engine._client.pid, signal.SIGKILL)
    async with asyncio.timeout(DEADLINE):
        results = await asyncio.gather(*readers, return_exceptions=True)
        await asyncio.gather(health, return_exceptions=True)
    assert all(isinstance(r, EngineDeadError) for r in results[1:])
    assert engine.errored
    assert isinstance(engine.dead_error, EngineDeadError)
    assert engine.num_unfinished_requests == 0
    assert await engine.wait_for_drain(DEADLINE)
    for call in (collect(engine, [5]), engine.check_health(), engine.reset_prefix_cache()):
        with pytest.raises(EngineDeadError):
            await call
    await engine.abort("anything")


async def test_a_request_that_kills_the_core(engine: AsyncLLM) -> None:
    async with asyncio.timeout(DEADLINE):
        results = await asyncio.gather(
            collect(engine, [DIE]), collect(engine, [5], max_tokens=100), return_exceptions=True
        )
    assert all(isinstance(r, EngineDeadError) for r in results)


async def test_death_without_any_request(engine: AsyncLLM) -> None:
    os.kill(engine._client.pid, signal.SIGKILL)
    async with asyncio.timeout(DEADLINE):
        while not engine.errored:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError):
            await engine.check_health()


async def test_health_is_an_answer_of_the_cores_loop(engine: AsyncLLM) -> None:
    await engine.check_health()
    stuck = asyncio.ensure_future(collect(engine, [HANG]))
    with pytest.raises(EngineDeadError, match="did not answer"):
        await check_for_ever(engine)
    os.kill(engine._client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await stuck


async def test_a_failure_of_output_processing_ends_every_stream(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(engine._outputs, "process_outputs", fail)
    with pytest.raises(EngineDeadError) as caught:
        await collect(engine, [5])
    assert "secret" not in caught.value.message
    assert engine.errored


async def test_an_unexpected_failure_of_one_request_is_its_own(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = engine._outputs.add_request

    def fail_once(request: Any, *args: Any) -> Any:
        if request.external_req_id == "bad":
            raise RuntimeError("/secret/path")
        return add(request, *args)

    monkeypatch.setattr(engine._outputs, "add_request", fail_once)
    with pytest.raises(EngineGenerateError) as caught:
        async for _ in engine.generate([5], greedy(), "bad"):
            pass
    assert "secret" not in caught.value.message
    assert tokens(await collect(engine, [5])) == continuation([5], 6)


# -- pauses -----------------------------------------------------------------------------------


async def opened(engine: AsyncLLM, count: int) -> None:
    async with asyncio.timeout(DEADLINE):
        while engine.num_unfinished_requests != count:
            await asyncio.sleep(0)


async def held(engine: AsyncLLM, pause: Any) -> None:
    """Wait until `pause` keeps new requests out."""
    async with asyncio.timeout(DEADLINE):
        while not await engine.is_paused():
            assert not pause.done()
            await asyncio.sleep(0)


@pytest.mark.parametrize("ahead", [False, True])
async def test_keeping_requests_freezes_them(make_config: Any, ahead: bool) -> None:
    engine = AsyncLLM.from_config(make_config(async_scheduling=ahead))
    first = engine.generate([SLOW], greedy(max_tokens=100))
    seen = tokens([await anext(first)])
    await engine.pause_generation("keep")
    assert await engine.is_paused()
    # The core has let go of all KV, and hears of new requests without running them.
    assert await engine.reset_prefix_cache()
    second = asyncio.ensure_future(collect(engine, [6]))
    await opened(engine, 2)
    async with asyncio.timeout(DEADLINE):
        while sum(await engine._client.call_utility("get_request_counts")) != 2:
            pass
    running, _ = await engine._client.call_utility("get_request_counts")
    assert running == 0
    await engine.resume_generation()
    assert not await engine.is_paused()
    seen += [t async for o in first for t in tokens([o])]
    assert seen == continuation([SLOW], 100)
    assert tokens(await second) == continuation([6], 6)
    engine.shutdown()


async def test_kept_requests_keep_their_kv_if_the_caches_are_kept(engine: AsyncLLM) -> None:
    stream = engine.generate([SLOW] * 9, greedy(max_tokens=100))
    seen = tokens([await anext(stream)])
    await engine.pause_generation("keep", clear_cache=False)
    assert (await engine._client.call_utility("get_request_counts"))[0] == 1
    assert not await engine.reset_prefix_cache()
    await engine.resume_generation()
    seen += [t async for o in stream for t in tokens([o])]
    assert seen == continuation([SLOW] * 9, 100)


async def test_aborting_ends_all_and_keeps_new_ones_out(engine: AsyncLLM) -> None:
    readers = [
        asyncio.ensure_future(collect(engine, [5 + i], max_tokens=None, n=1 + i % 2))
        for i in range(6)
    ]
    await opened(engine, 9)
    await engine.pause_generation()
    for outputs in await asyncio.gather(*readers):
        assert outputs[-1].finished
        assert {c.finish_reason for c in outputs[-1].outputs} == {"abort"}
    late = asyncio.ensure_future(collect(engine, [6]))
    gone = asyncio.ensure_future(collect(engine, [7]))
    await engine.check_health()
    assert engine.num_unfinished_requests == 0
    gone.cancel()
    # A second pause, of another mode, takes over from the first.
    await engine.pause_generation("wait")
    assert engine.num_unfinished_requests == 0
    assert not late.done()
    await engine.resume_generation()
    assert tokens(await late) == continuation([6], 6)
    with pytest.raises(asyncio.CancelledError):
        await gone
    await engine.resume_generation()


async def test_waiting_lets_requests_finish(engine: AsyncLLM) -> None:
    reader = asyncio.ensure_future(collect(engine, [SLOW] * 40, max_tokens=80))
    await opened(engine, 1)
    pause = asyncio.ensure_future(engine.pause_generation("wait"))
    await held(engine, pause)
    late = asyncio.ensure_future(collect(engine, [SLOW] * 40))
    await pause
    assert tokens(await reader) == continuation([SLOW] * 40, 80)
    assert engine.num_unfinished_requests == 0
    await engine.resume_generation()
    outputs = await late
    assert tokens(outputs) == continuation([SLOW] * 40, 6)
    # The caches have been cleared.
    assert outputs[0].num_cached_tokens == 0


async def test_a_pause_that_waits_can_be_ended(engine: AsyncLLM) -> None:
    await engine.pause_generation("keep", clear_cache=False)
    stuck = asyncio.ensure_future(collect(engine, [5], max_tokens=100))
    await opened(engine, 1)
    await engine.resume_generation()
    stream = engine.generate([HANG], greedy())
    reading = asyncio.ensure_future(anext(stream))
    pause = asyncio.ensure_future(engine.pause_generation("wait"))
    await held(engine, pause)
    late = asyncio.ensure_future(collect(engine, [6]))
    # Nothing is locked meanwhile.
    assert await engine.is_paused()
    await engine.resume_generation()
    await pause
    assert not await engine.is_paused()
    await opened(engine, 3)
    os.kill(engine._client.pid, signal.SIGKILL)
    await asyncio.gather(stuck, reading, late, return_exceptions=True)


async def test_waiting_thaws_what_an_earlier_pause_froze(engine: AsyncLLM) -> None:
    await engine.pause_generation("keep")
    reader = asyncio.ensure_future(collect(engine, [5], max_tokens=20))
    await opened(engine, 1)
    async with asyncio.timeout(DEADLINE):
        await engine.pause_generation("wait")
    assert tokens(await reader) == continuation([5], 20)
    assert await engine.is_paused()


async def test_who_waits_for_the_end_of_a_pause_hears_of_the_engines_end(engine: AsyncLLM) -> None:
    await engine.pause_generation("wait")
    waiting = asyncio.ensure_future(collect(engine, [5]))
    await asyncio.sleep(0)
    os.kill(engine._client.pid, signal.SIGKILL)
    async with asyncio.timeout(DEADLINE):
        with pytest.raises(EngineDeadError):
            await waiting


async def test_an_unknown_mode_is_refused(engine: AsyncLLM) -> None:
    with pytest.raises(ValidationError, match="abort, wait or keep, got 'later'"):
        await engine.pause_generation("later")  # type: ignore[arg-type]
    assert not await engine.is_paused()


# -- end --------------------------------------------------------------------------------------


async def test_draining(engine: AsyncLLM) -> None:
    assert await engine.wait_for_drain(0)
    reader = asyncio.ensure_future(collect(engine, [5], max_tokens=100))
    while not engine.num_unfinished_requests:
        await asyncio.sleep(0)
    assert not await engine.wait_for_drain(0)
    assert await engine.wait_for_drain(DEADLINE)
    assert tokens(await reader) == continuation([5], 100)


async def test_shutdown_ends_open_streams(engine: AsyncLLM) -> None:
    stream = engine.generate([5], greedy(max_tokens=None))
    await anext(stream)
    engine.shutdown()
    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass
    engine.shutdown()
    with pytest.raises(EngineDeadError):
        await collect(engine, [5])


def test_one_loop_after_another(make_config: Any) -> None:
    engine = AsyncLLM.from_config(make_config())
    for run in (asyncio.run, uvloop.run, uvloop.run, asyncio.run):
        assert tokens(run(collect(engine, [5]))) == continuation([5], 6)
    engine.shutdown()


async def test_construction_in_another_thread(make_config: Any) -> None:
    engine = await asyncio.to_thread(AsyncLLM.from_config, make_config())
    assert tokens(await collect(engine, [5])) == continuation([5], 6)
    await asyncio.to_thread(engine.shutdown)
    assert engine.errored


async def test_options_by_name(model_folder: Any) -> None:
    engine = AsyncLLM(
        model=str(model_folder),
        device="cpu",
        block_size=8,
        distributed_executor_backend="tests.engine.fakes.FakeExecutor",
    )
    assert engine.config.cache_config.block_size == 8
    assert engine.ready.max_num_seqs == 128
    assert tokens(await collect(engine, [5])) == continuation([5], 6)
    engine.shutdown()


async def test_outputs_are_processed_in_slices(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_llm, "OUTPUT_SLICE", 4)
    sizes = []
    process = engine._outputs.process_outputs

    def note(outputs: Any, *args: Any) -> Any:
        sizes.append(len(outputs))
        return process(outputs, *args)

    monkeypatch.setattr(engine._outputs, "process_outputs", note)
    results = await asyncio.gather(*(collect(engine, [5 + i]) for i in range(20)))
    assert all(tokens(r) == continuation([5 + i], 6) for i, r in enumerate(results))
    assert max(sizes) == 4
