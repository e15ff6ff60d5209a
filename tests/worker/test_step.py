"""The protocol of a step, and what its inputs look like."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from jubako.errors import NotImplementedFeatureError
from jubako.kernels.metadata import AttentionMetadata
from jubako.sampling_params import SamplingParams
from jubako.scheduler.model_output import EMPTY_MODEL_RUNNER_OUTPUT
from jubako.scheduler.output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from jubako.worker.model_runner import ModelRunner
from jubako.worker.request_state import CachedRequestState
from jubako.worker.staging import StepStaging
from jubako.worker.step_inputs import StepInputBuilder
from tests.worker.driver import Driver, Job
from tests.worker.stub_model import GROUPS, VOCAB_SIZE, make_config, make_runner
from tests.worker.test_random_steps import random_jobs, run_mixed

GREEDY = SamplingParams(temperature=0)


def new(req_id: str, prompt: list[int], blocks: list[int], **changes: object) -> NewRequestData:
    values: dict = {
        "req_id": req_id,
        "prompt_token_ids": prompt,
        "sampling_params": GREEDY,
        "block_ids": (blocks,),
        "num_computed_tokens": 0,
        "seed": 1,
    }
    return NewRequestData(**values | changes)


def plan(scheduled: dict[str, int], **changes: object) -> SchedulerOutput:
    return SchedulerOutput(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        **changes,
    )


def simple_runner(**config: int) -> ModelRunner:
    return make_runner(make_config(**config), groups=((4, None, 1),))


# -- phases -----------------------------------------------------------------------------------


def test_a_step_must_be_sampled_before_the_next() -> None:
    runner = simple_runner()
    step = plan({"a": 2}, scheduled_new_reqs=[new("a", [1, 2], [1])])
    assert runner.execute_model(step) is None
    with pytest.raises(RuntimeError, match="sample_tokens"):
        runner.execute_model(plan({"a": 1}))
    assert runner.sample_tokens(None).sampled_token_ids == [runner.model.greedy([1, 2], 1)]


def test_sampling_without_a_step_gives_nothing() -> None:
    assert simple_runner().sample_tokens(None) is None


def test_a_step_without_tokens_still_drops_finished_requests() -> None:
    runner = simple_runner()
    scored = SamplingParams(temperature=0, prompt_logprobs=1)
    added = new("a", [1, 2, 3, 4], [1], sampling_params=scored)
    runner.execute_model(plan({"a": 2}, scheduled_new_reqs=[added]))
    runner.sample_tokens(None)
    output = runner.execute_model(plan({}, finished_req_ids={"a"}))
    assert output is EMPTY_MODEL_RUNNER_OUTPUT
    assert not runner.requests
    assert not runner._scored
    assert runner.input_batch.num_reqs == 0
    assert runner.sample_tokens(None) is None


def test_returned_ids_are_copies() -> None:
    runner = simple_runner()
    runner.execute_model(plan({"a": 2}, scheduled_new_reqs=[new("a", [1, 2], [1])]))
    output = runner.sample_tokens(None)
    runner.execute_model(plan({}, finished_req_ids={"a"}))
    assert output.req_ids == ["a"]
    assert output.req_id_to_index == {"a": 0}


# -- the mirror -------------------------------------------------------------------------------


def test_an_id_may_end_and_come_back_in_one_step() -> None:
    runner = simple_runner()
    runner.execute_model(plan({"a": 2}, scheduled_new_reqs=[new("a", [1, 2], [1])]))
    runner.sample_tokens(None)
    runner.execute_model(
        plan({"a": 3}, scheduled_new_reqs=[new("a", [9, 8, 7], [2])], finished_req_ids={"a"})
    )
    assert runner.sample_tokens(None).sampled_token_ids == [runner.model.greedy([9, 8, 7], 1)]
    assert runner.requests["a"].prompt_token_ids == [9, 8, 7]


def test_a_known_id_that_comes_as_new_starts_over() -> None:
    runner = simple_runner()
    runner.execute_model(plan({"a": 2}, scheduled_new_reqs=[new("a", [1, 2], [1])]))
    runner.sample_tokens(None)
    longer = [1, 2, 5, 6]
    runner.execute_model(plan({"a": 4}, scheduled_new_reqs=[new("a", longer, [3])]))
    assert runner.sample_tokens(None).sampled_token_ids == [runner.model.greedy(longer, 1)]
    assert runner.input_batch.num_reqs == 1


def test_outputs_that_the_scheduler_took_back_are_forgotten() -> None:
    runner = simple_runner()
    prompt = [1, 2, 3]
    tokens = runner.model.greedy(prompt, 3)
    runner.execute_model(plan({"a": 3}, scheduled_new_reqs=[new("a", prompt, [1, 2])]))
    runner.sample_tokens(None)
    for computed in (3, 4):
        cached = CachedRequestData(
            req_ids=["a"],
            new_block_ids=[None],
            num_computed_tokens=[computed],
            num_output_tokens=[computed - 2],
        )
        runner.execute_model(plan({"a": 1}, scheduled_cached_reqs=cached))
        runner.sample_tokens(None)
    output = runner.requests["a"].output_token_ids
    assert output == tokens
    cached = CachedRequestData(
        req_ids=["a"], new_block_ids=[None], num_computed_tokens=[2], num_output_tokens=[1]
    )
    runner.execute_model(plan({"a": 2}, scheduled_cached_reqs=cached))
    assert output == tokens[:1]
    assert runner.sample_tokens(None).sampled_token_ids == [[tokens[1]]]
    assert runner.requests["a"].output_token_ids is output


def test_the_schedulers_own_block_lists_are_not_kept() -> None:
    runner = simple_runner()
    blocks = [1]
    runner.execute_model(plan({"a": 2}, scheduled_new_reqs=[new("a", [1, 2], blocks)]))
    runner.sample_tokens(None)
    blocks.append(99)
    assert runner.requests["a"].block_ids == ([1],)


@pytest.mark.parametrize("seed", range(3))
def test_after_each_step_the_batch_mirrors_the_plan(seed: int) -> None:
    rng = random.Random(seed)
    runner = make_runner()
    driver = Driver(runner, GROUPS, seed=seed)
    execute = runner.execute_model

    def checked(step: SchedulerOutput) -> object:
        result = execute(step)
        batch = runner.input_batch
        assert set(batch.req_ids) == set(step.num_scheduled_tokens)
        assert [batch.req_id_to_index[r] for r in batch.req_ids] == list(range(batch.num_reqs))
        assert set(batch.req_ids) <= set(runner.requests)
        for row, req_id in enumerate(batch.req_ids):
            state = runner.requests[req_id]
            known = state.prompt_token_ids + state.output_token_ids
            count = batch.num_tokens_no_spec[row]
            assert batch.token_ids_cpu[row, :count].tolist() == known
            assert batch.req_output_token_ids[row] is state.output_token_ids
        gone = step.finished_req_ids - {r.req_id for r in step.scheduled_new_reqs}
        assert not gone & (set(runner.requests) | set(batch.req_ids))
        return result

    runner.execute_model = checked
    run_mixed(driver, random_jobs(rng, 10), rng)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": None, "prompt_embeds": "x"},
        {"sampling_params": None},
    ],
)
def test_requests_that_are_not_built_are_refused(changes: dict) -> None:
    runner = simple_runner()
    with pytest.raises(NotImplementedFeatureError, match="Only token ids"):
        runner.execute_model(plan({"a": 2}, scheduled_new_reqs=[new("a", [1, 2], [1], **changes)]))


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_tokens_that_the_scheduler_only_counts_are_kept(in_flight: int) -> None:
    """A request that sat out a step, told when its last tokens had not come back."""
    runner = simple_runner()
    prompt = [1, 2, 3]
    tokens = runner.model.greedy(prompt, 4)
    runner.execute_model(plan({"a": 3}, scheduled_new_reqs=[new("a", prompt, [1, 2])]))
    runner.sample_tokens(None)
    for computed in (3, 4):
        cached = CachedRequestData(
            req_ids=["a"],
            new_block_ids=[None],
            num_computed_tokens=[computed],
            num_output_tokens=[computed - 2],
        )
        runner.execute_model(plan({"a": 1}, scheduled_cached_reqs=cached))
        runner.sample_tokens(None)
    runner.execute_model(plan({"b": 2}, scheduled_new_reqs=[new("b", [1, 2], [3])]))
    runner.sample_tokens(None)
    cached = CachedRequestData(
        req_ids=["a"],
        all_token_ids={"a": prompt + tokens[: 3 - in_flight]},
        new_block_ids=[None],
        num_computed_tokens=[5],
        num_output_tokens=[3],
    )
    runner.execute_model(plan({"a": 1}, scheduled_cached_reqs=cached))
    assert runner.requests["a"].output_token_ids == tokens[:3]
    assert runner.sample_tokens(None).sampled_token_ids == [[tokens[3]]]


def test_tokens_that_were_dropped_in_flight_are_forgotten() -> None:
    runner = simple_runner()
    prompt = [1, 2, 3]
    tokens = runner.model.greedy(prompt, 2)
    runner.execute_model(plan({"a": 3}, scheduled_new_reqs=[new("a", prompt, [1, 2])]))
    runner.sample_tokens(None)
    cached = CachedRequestData(
        req_ids=["a"],
        resumed_req_ids={"a"},
        all_token_ids={"a": prompt},
        new_block_ids=[([5],)],
        num_computed_tokens=[0],
        num_output_tokens=[0],
    )
    runner.execute_model(plan({"a": 3}, scheduled_cached_reqs=cached))
    assert runner.requests["a"].output_token_ids == []
    assert runner.sample_tokens(None).sampled_token_ids == [[tokens[0]]]


# -- inputs -----------------------------------------------------------------------------------


def build_inputs(
    runner: ModelRunner, computed: list[int], scheduled: list[int], known: list[int]
) -> tuple[StepInputBuilder, object]:
    batch = runner.input_batch
    for i, (done, total) in enumerate(zip(computed, known)):
        tokens = [(10 * i + p) % VOCAB_SIZE for p in range(total)]
        state = CachedRequestState(f"r{i}", tokens, GREEDY, 0, ([3 * i + 1, 3 * i + 2],), done)
        batch.add_request(state)
    batch.condense()
    batch.refresh_metadata()
    builder = runner._input_builder
    return builder, builder.build(batch, {f"r{i}": s for i, s in enumerate(scheduled)})


def test_positions_lengths_and_logits_rows() -> None:
    runner = make_runner(groups=((8, None, 1),))
    builder, inputs = build_inputs(runner, [4, 0, 9], [1, 3, 2], [5, 3, 11])
    assert builder.query_start_loc.tolist() == [0, 1, 4, 6, 6, 6, 6]
    assert inputs.positions.tolist() == [4, 0, 1, 2, 9, 10]
    assert builder.seq_lens.tolist() == [5, 3, 11, 0, 0, 0]
    assert inputs.logits_indices.tolist() == [0, 3, 5]
    assert inputs.logits_rows.tolist() == [0, 1, 2]
    assert inputs.input_ids.tolist() == [4, 10, 11, 12, 29, 30]
    metadata = inputs.attention["g0.0"]
    assert metadata.slot_mapping.tolist() == [12, 32, 33, 34, 65, 66]
    assert metadata.query_start_loc.tolist() == [0, 1, 4, 6]
    assert (metadata.max_query_len, metadata.max_seq_len) == (3, 11)
    assert (metadata.num_reqs, metadata.num_actual_tokens) == (3, 6)


def test_a_smaller_step_leaves_nothing_of_a_larger_one() -> None:
    runner = make_runner(groups=((8, None, 1),))
    builder, _ = build_inputs(runner, [4, 0, 9], [1, 3, 2], [5, 3, 11])
    for req_id in ("r0", "r2"):
        runner.input_batch.remove_request(req_id)
    runner.input_batch.condense()
    runner.input_batch.refresh_metadata()
    builder.build(runner.input_batch, {"r1": 3})
    assert builder.query_start_loc.tolist() == [0, 3, 3, 3, 3, 3, 3]
    assert builder.seq_lens.tolist() == [3, 0, 0, 0, 0, 0]


def test_rows_inside_their_prompt_have_no_logits() -> None:
    runner = make_runner(groups=((8, None, 1),))
    _, inputs = build_inputs(runner, [4, 0, 0], [1, 3, 8], [5, 4, 13])
    assert inputs.logits_rows.tolist() == [0]
    assert inputs.logits_indices.tolist() == [0]


def test_a_resumed_row_is_sampled_only_past_its_known_outputs() -> None:
    runner = make_runner(groups=((8, None, 1),))
    state = CachedRequestState("a", [1] * 10, GREEDY, 0, ([1, 2],), 0, [5, 6, 7])
    runner.input_batch.add_request(state)
    runner.input_batch.refresh_metadata()
    assert not runner._input_builder.build(runner.input_batch, {"a": 8}).logits_rows.size
    runner.input_batch.num_computed_tokens_cpu[0] = 8
    assert runner._input_builder.build(runner.input_batch, {"a": 5}).logits_rows.tolist() == [0]


def test_layers_of_a_group_share_their_metadata() -> None:
    runner = make_runner()
    runner.execute_model(
        plan({"a": 2}, scheduled_new_reqs=[new("a", [1, 2], [], block_ids=([5], [6], [7]))])
    )
    attention = runner._state.inputs.attention
    assert attention["g0.0"] is attention["g0.1"]
    assert attention["g0.0"] is not attention["g1.0"]
    assert [attention[f"g{g}.0"].block_table_tensor.tolist() for g in range(3)] == [
        [[5]],
        [[6]],
        [[7]],
    ]


def test_packed_copies_equal_aliases() -> None:
    arrays = {
        "a": np.arange(7, dtype=np.int64),
        "b": np.arange(30, dtype=np.int32).reshape(5, 6)[:3, :2],
        "c": np.zeros((2, 0), dtype=np.int32),
        "d": np.arange(3, dtype=np.int32),
    }
    packed = StepStaging(torch.device("cpu"), alias=False)
    for _ in range(2):
        tensors = packed.to_device(arrays)
        for name, tensor in StepStaging(torch.device("cpu")).to_device(arrays).items():
            assert torch.equal(tensors[name], tensor)
            assert tensors[name].dtype == tensor.dtype
        arrays["a"] += 1
        assert tensors["a"].tolist() == list(range(7)) or tensors["a"][0] == arrays["a"][0] - 1


def test_on_plain_memory_nothing_is_copied() -> None:
    array = np.arange(5)
    tensor = StepStaging(torch.device("cpu")).to_device({"a": array})["a"]
    array[2] = 9
    assert tensor[2] == 9


def test_slots_lie_in_the_requests_own_blocks() -> None:
    runner = make_runner()
    rng = random.Random(3)
    driver = Driver(runner, GROUPS, seed=3)
    build = runner._input_builder.build

    def checked(batch: object, scheduled: dict[str, int], encoded_rows: np.ndarray) -> object:
        inputs = build(batch, scheduled, encoded_rows)
        positions = inputs.positions.numpy()
        starts = inputs.query_start_loc
        for group, (block_size, _, _) in enumerate(GROUPS):
            metadata: AttentionMetadata = inputs.attention[f"g{group}.0"]
            slots = metadata.slot_mapping.numpy()
            assert len(set(slots)) == len(slots)
            for row, req_id in enumerate(batch.req_ids):
                part = slice(starts[row], starts[row + 1])
                own = np.array(runner.requests[req_id].block_ids[group])
                assert (slots[part] // block_size == own[positions[part] // block_size]).all()
                assert (slots[part] % block_size == positions[part] % block_size).all()
                computed = batch.num_computed_tokens_cpu[row]
                assert positions[starts[row]] == computed
                query_len = starts[row + 1] - starts[row]
                assert metadata.seq_lens[row] - query_len == computed
        return inputs

    runner._input_builder.build = checked
    run_mixed(driver, random_jobs(rng, 10), rng)


# -- sampling in a step -----------------------------------------------------------------------


def test_prompt_logprobs_survive_a_step_that_is_missed() -> None:
    prompt = [(5 * i + 1) % VOCAB_SIZE for i in range(14)]
    params = SamplingParams(temperature=0, prompt_logprobs=2)
    job = Job("a", prompt, params, 1, 2)
    driver = Driver(make_runner(), GROUPS)
    driver.step([job], {"a": 5}, calm=True)
    other = Job("b", [1, 2, 3], GREEDY, 1, 4)
    driver.live.remove(job)
    driver.step([other], calm=True)
    driver.live.append(job)
    assert job.prompt_logprobs is None
    while not job.done:
        driver.step(chunks={"a": 4}, calm=True)
    logits = driver.runner.model.dense_logits(prompt).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    lists = job.prompt_logprobs
    assert lists.logprob_token_ids.shape == (13, 3)
    for i, token_id in enumerate(prompt[1:]):
        assert lists.logprob_token_ids[i, 0] == token_id
        np.testing.assert_allclose(lists.logprobs[i, 0], expected[i, token_id], atol=1e-4)
        best = expected[i].argsort()[::-1][:2]
        assert lists.logprob_token_ids[i, 1:].tolist() == best.tolist()
        assert lists.sampled_token_ranks[i] == (expected[i] >= expected[i, token_id]).sum()


def test_a_prompt_of_one_token_has_prompt_logprobs_without_rows() -> None:
    driver = Driver(make_runner(), GROUPS)
    job = driver.run_alone(Job("a", [4], SamplingParams(temperature=0, prompt_logprobs=2), 1, 2))
    assert job.prompt_logprobs.logprobs.shape == (0, 3)


def test_prompt_logprobs_of_the_whole_vocabulary() -> None:
    driver = Driver(make_runner(), GROUPS)
    params = SamplingParams(temperature=0, prompt_logprobs=-1)
    job = driver.run_alone(Job("a", [4, 5], params, 1, 1))
    assert job.prompt_logprobs.logprobs.shape == (1, VOCAB_SIZE + 1)
    assert sorted(job.prompt_logprobs.logprob_token_ids[0, 1:]) == list(range(VOCAB_SIZE))


def test_a_grammars_mask_reaches_its_own_row() -> None:
    runner = simple_runner()
    runner.execute_model(
        plan(
            {"a": 2, "chunk": 1, "b": 3},
            scheduled_new_reqs=[
                new("a", [1, 2], [1]),
                new("chunk", [1, 2], [2]),
                new("b", [3, 4, 5], [3]),
            ],
        )
    )
    words = np.zeros((2, 2), dtype=np.int32)
    words[1, 1] = 1 << (37 - 32)
    mask = GrammarOutput(structured_output_request_ids=["gone", "b"], grammar_bitmask=words)
    output = runner.sample_tokens(mask)
    by_id = dict(zip(output.req_ids, output.sampled_token_ids))
    assert by_id == {"a": runner.model.greedy([1, 2], 1), "chunk": [], "b": [37]}


def test_one_requests_logprobs_leave_its_neighbours_alone() -> None:
    runner = simple_runner()
    everything = SamplingParams(temperature=0, logprobs=-1)
    two = SamplingParams(temperature=0, logprobs=2)
    runner.execute_model(
        plan(
            {"none": 2, "all": 2, "two": 2},
            scheduled_new_reqs=[
                new("none", [1, 2], [1]),
                new("all", [3, 4], [2], sampling_params=everything),
                new("two", [5, 6], [3], sampling_params=two),
            ],
        )
    )
    output = runner.sample_tokens(None)
    widths = {
        req_id: output.logprobs.slice_request(output.req_id_to_index[req_id], 1).logprobs.shape
        for req_id in ("all", "two")
    }
    assert widths == {"all": (1, VOCAB_SIZE + 1), "two": (1, 3)}
    assert len(output.logprobs.logprobs) == 2


def test_unseeded_requests_are_reproducible_from_the_engines_seed() -> None:
    def run() -> list[list[int]]:
        runner = simple_runner()
        runner.dummy_run(8, 2)
        runner.reseed()
        params = SamplingParams(temperature=1.5)
        arrivals = [
            new(f"r{i}", [1, 2], [i + 1], sampling_params=params, seed=None) for i in range(6)
        ]
        runner.execute_model(plan({f"r{i}": 2 for i in range(6)}, scheduled_new_reqs=arrivals))
        return runner.sample_tokens(None).sampled_token_ids

    assert run() == run()
    assert len({tuple(ids) for ids in run()}) > 1
