"""Rows move; what belongs to a request moves with it, and nothing stays behind."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jubako.sampling.builtin_processors import build_processors
from jubako.sampling.logits_processors import (
    AddedRow,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    apply_processors,
)
from jubako.sampling.metadata import NO_LOGPROBS
from jubako.sampling_params import SamplingParams
from jubako.worker.block_table import MultiGroupBlockTable
from jubako.worker.input_batch import InputBatch
from jubako.worker.request_state import CachedRequestState
from tests.worker.stub_model import VOCAB_SIZE, make_config
from tests.worker.test_random_steps import random_params

ROWS, LENGTH = 6, 40


def new_batch(custom: list[type[LogitsProcessor]] | None = None) -> InputBatch:
    return InputBatch(
        ROWS,
        LENGTH,
        VOCAB_SIZE,
        MultiGroupBlockTable.build([4, 8], [4, 4], ROWS, LENGTH, 64),
        build_processors(make_config(), torch.device("cpu"), custom),
    )


def new_request(
    req_id: str, rng: random.Random, params: SamplingParams | None = None
) -> CachedRequestState:
    tokens = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))]
    cut = rng.randint(1, len(tokens))
    return CachedRequestState(
        req_id=req_id,
        prompt_token_ids=tokens[:cut],
        sampling_params=params or random_params(rng),
        seed=rng.getrandbits(64),
        block_ids=(
            [rng.randrange(99) for _ in range(rng.randint(1, 10))],
            [rng.randrange(99) for _ in range(rng.randint(1, 5))],
        ),
        num_computed_tokens=rng.randint(0, len(tokens) - 1),
        output_token_ids=tokens[cut:],
    )


def assert_same(batch: InputBatch, wanted: InputBatch) -> None:
    """Every per-row field and every processor's effect are those of `wanted`."""
    assert batch.req_ids == wanted.req_ids
    assert batch.req_id_to_index == wanted.req_id_to_index
    n = wanted.num_reqs
    for name in vars(wanted):
        field, other = getattr(batch, name), getattr(wanted, name)
        if field in batch._fields and hasattr(field, "values"):
            assert list(field.values) == list(other.values), name
    for row in range(ROWS):
        assert batch._tokens.row(row).tolist() == wanted._tokens.row(row).tolist()
        for table, other in zip(batch.block_table, wanted.block_table):
            assert table.row(row).tolist() == other.row(row).tolist()
    metadata, expected = batch.sampling_metadata, wanted.sampling_metadata
    for name in vars(expected):
        if name != "logitsprocs":
            assert np.array_equal(getattr(metadata, name), getattr(expected, name)) or (
                getattr(metadata, name) == getattr(expected, name)
            ), name
    logits = torch.linspace(-3, 5, n * VOCAB_SIZE).reshape(n, VOCAB_SIZE)
    for mine, theirs in zip(batch.logitsprocs.all, wanted.logitsprocs.all):
        assert set(mine.rows) == set(theirs.rows), type(mine).__name__
        assert mine.is_active() == theirs.is_active()
        if n:
            result = apply_processors([mine], logits.clone(), range(n), n)
            assert torch.equal(result, apply_processors([theirs], logits.clone(), range(n), n))


class BatchMachine(RuleBasedStateMachine):
    """Steps of removals, additions, condensing and swaps, against a batch built from scratch."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = new_batch()
        self.order: list[str] = []
        self.requests: dict[str, CachedRequestState] = {}
        self.count = 0

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.rng = random.Random(seed)

    @rule(share=st.sampled_from([0.0, 0.3, 0.7]), arriving=st.sampled_from([0, 0, 1, 3, ROWS]))
    def step(self, share: float, arriving: int) -> None:
        leaving = [req_id for req_id in self.order if self.rng.random() < share]
        for req_id in self.rng.sample(leaving, len(leaving)):
            self.batch.remove_request(req_id)
        for _ in range(arriving):
            if self.batch.num_reqs < ROWS:
                self.count += 1
                request = new_request(f"r{self.count}", self.rng)
                self.requests[request.req_id] = request
                self.batch.add_request(request)
        self.batch.condense()

    @precondition(lambda self: self.batch.num_reqs > 1)
    @rule(first=st.integers(0, ROWS - 1), second=st.integers(0, ROWS - 1))
    def swap(self, first: int, second: int) -> None:
        n = self.batch.num_reqs
        self.batch.swap_states(first % n, second % n)

    @precondition(lambda self: self.batch.num_reqs)
    @rule()
    def emit(self) -> None:
        """Every row with room gets a token."""
        self.batch.refresh_metadata()
        rows = np.array(
            [
                row
                for row in range(self.batch.num_reqs)
                if self.batch.num_tokens_no_spec[row] < LENGTH
            ],
            dtype=np.int64,
        )
        self.batch.append_tokens(rows, [self.rng.randrange(VOCAB_SIZE) for _ in rows])

    @invariant()
    def equals_a_batch_built_from_scratch(self) -> None:
        self.batch.refresh_metadata()
        self.order = list(self.batch.req_ids)
        wanted = new_batch()
        for req_id in self.order:
            wanted.add_request(self.requests[req_id])
        wanted.refresh_metadata()
        assert_same(self.batch, wanted)


TestBatchMachine = BatchMachine.TestCase
TestBatchMachine.settings = settings(
    max_examples=40,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class Recorder(LogitsProcessor):
    """Keeps the updates that it gets."""

    def __init__(self, config: object, device: torch.device, is_pin_memory: bool = False) -> None:
        self.updates: list[BatchUpdate | None] = []

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updates.append(copy.copy(batch_update))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


def test_removed_added_and_moved_rows_are_reported_once() -> None:
    rng = random.Random(0)
    batch = new_batch([Recorder])
    recorder = batch.logitsprocs.argmax_invariant[-1]
    for name in "PQRST":
        batch.add_request(new_request(name, rng))
    batch.condense()
    batch.refresh_metadata()
    assert [added.row for added in recorder.updates[-1].added] == [0, 1, 2, 3, 4]

    batch.remove_request("S")
    batch.remove_request("Q")
    assert batch.add_request(new_request("U", rng)) == 1
    batch.condense()
    assert batch.req_ids == ["P", "U", "R", "T"]
    batch.refresh_metadata()
    update = recorder.updates[-1]
    assert (update.batch_size, list(update.removed)) == (4, [])
    assert [added.row for added in update.added] == [1]
    assert list(update.moved) == [(4, 3, MoveDirectionality.UNIDIRECTIONAL)]

    batch.remove_request("P")
    batch.remove_request("R")
    batch.condense()
    assert batch.req_ids == ["T", "U"]
    batch.refresh_metadata()
    update = recorder.updates[-1]
    assert list(update.removed) == [2]
    assert list(update.moved) == [(3, 0, MoveDirectionality.UNIDIRECTIONAL)]

    batch.refresh_metadata()
    assert recorder.updates[-1] is None


def test_sampling_metadata_is_rebuilt_only_when_rows_change() -> None:
    rng = random.Random(0)
    batch = new_batch()
    batch.add_request(new_request("a", rng))
    batch.refresh_metadata()
    before = batch.sampling_metadata
    batch.append_tokens(np.array([0]), [1])
    batch.refresh_metadata()
    assert batch.sampling_metadata is before
    batch.remove_request("a")
    batch.condense()
    batch.refresh_metadata()
    assert batch.sampling_metadata is not before


def test_metadata_flags_follow_the_live_rows() -> None:
    rng = random.Random(0)
    batch = new_batch()
    special = SamplingParams(
        temperature=1, top_k=3, top_p=0.5, presence_penalty=1, logprobs=-1, allowed_token_ids=[1]
    )
    batch.add_request(new_request("special", rng, special))
    batch.add_request(new_request("plain", rng, SamplingParams(temperature=0)))
    batch.refresh_metadata()
    metadata = batch.sampling_metadata
    assert not metadata.all_greedy
    assert not metadata.all_random
    assert not any((metadata.no_top_k, metadata.no_top_p, metadata.no_penalties))
    assert metadata.max_num_logprobs == VOCAB_SIZE
    batch.remove_request("special")
    batch.condense()
    batch.refresh_metadata()
    metadata = batch.sampling_metadata
    assert metadata.all_greedy
    assert metadata.no_top_k
    assert metadata.no_top_p
    assert metadata.no_penalties
    assert metadata.max_num_logprobs is None
    assert metadata.num_logprobs.tolist() == [NO_LOGPROBS]
    assert not metadata.logitsprocs.rows_with_changes(1)


@pytest.mark.parametrize("how", ["condense", "swap"])
def test_allowed_tokens_do_not_stay_behind_in_a_row(how: str) -> None:
    rng = random.Random(0)
    batch = new_batch()
    only_three = SamplingParams(temperature=0, allowed_token_ids=[3])
    for name in ("a", "b"):
        batch.add_request(new_request(name, rng, SamplingParams(temperature=0)))
    batch.add_request(new_request("c", rng, only_three))
    batch.refresh_metadata()
    if how == "condense":
        batch.remove_request("a")
        batch.condense()
        batch.refresh_metadata()
        batch.add_request(new_request("d", rng, SamplingParams(temperature=0)))
        limited = 0
    else:
        batch.swap_states(1, 2)
        limited = 1
    batch.refresh_metadata()
    logits = torch.zeros(3, VOCAB_SIZE)
    for processor in batch.logitsprocs.argmax_changing:
        logits = apply_processors([processor], logits, range(3), 3)
    allowed = (logits > -torch.inf).sum(dim=1).tolist()
    assert allowed == [1 if row == limited else VOCAB_SIZE for row in range(3)]


def test_a_row_cannot_outgrow_the_context() -> None:
    batch = new_batch()
    request = new_request("a", random.Random(0), SamplingParams(temperature=0))
    request.prompt_token_ids, request.output_token_ids = [1] * LENGTH, []
    batch.add_request(request)
    with pytest.raises(ValueError, match=f"max_model_len={LENGTH}"):
        batch.append_tokens(np.array([0]), [1])


def test_removing_after_adding_is_refused() -> None:
    rng = random.Random(0)
    batch = new_batch()
    batch.add_request(new_request("a", rng))
    with pytest.raises(AssertionError, match="before any is added"):
        batch.remove_request("a")


def test_a_temperature_beyond_float32_stays_finite() -> None:
    """Forbidden logits divided by infinity would be no numbers, and win."""
    batch = new_batch()
    batch.add_request(new_request("hot", random.Random(0), SamplingParams(temperature=1e300)))
    batch.refresh_metadata()
    assert np.isfinite(batch.sampling_metadata.temperature).all()


def test_top_k_outside_the_vocabulary_is_inactive() -> None:
    rng = random.Random(0)
    batch = new_batch()
    for top_k in (0, 1, VOCAB_SIZE - 1, VOCAB_SIZE, VOCAB_SIZE + 5):
        params = SamplingParams(temperature=1, top_k=top_k)
        batch.add_request(new_request(f"k{top_k}", rng, params))
    batch.refresh_metadata()
    assert batch.sampling_metadata.top_k.tolist() == [VOCAB_SIZE, 1, 52, VOCAB_SIZE, VOCAB_SIZE]


def test_rows_that_were_never_used_take_no_memory() -> None:
    # In a process of its own: where much was freed before, new arrays are cut from memory that is
    # resident already or has to be cleared.
    code = "from tests.worker.test_input_batch import memory_of_a_batch as m; print(m())"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True
    )
    assert int(done.stdout) < 8 << 20


def memory_of_a_batch() -> int:
    """Bytes that become resident with a large batch that has one request."""
    before = _resident_bytes()
    batch = InputBatch(
        256,
        131072,
        VOCAB_SIZE,
        MultiGroupBlockTable.build([16, 16], [16, 16], 256, 131072, 64),
        build_processors(make_config(), torch.device("cpu")),
    )
    rng = random.Random(0)
    batch.add_request(new_request("a", rng))
    batch.refresh_metadata()
    assert batch.token_ids_cpu.nbytes == 128 << 20
    return _resident_bytes() - before


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_processor_state_survives_a_move_onto_a_live_row() -> None:
    """Moves may overwrite: a builder never reports the overwritten row as removed."""
    processors = build_processors(make_config(), torch.device("cpu"))
    bias = next(p for p in processors.all if type(p).__name__.startswith("LogitBias"))
    a, b = (SamplingParams(temperature=0, logit_bias={i: 1.0}) for i in (1, 2))
    plain = SamplingParams(temperature=0)
    bias.update_state(BatchUpdate(3, [], [AddedRow(0, a, [], []), AddedRow(1, plain, [], [])], []))
    bias.update_state(BatchUpdate(3, [], [AddedRow(0, plain, [], []), AddedRow(2, b, [], [])], []))
    assert set(bias.rows) == {2}
    bias.update_state(BatchUpdate(2, [], [], [(2, 0, MoveDirectionality.UNIDIRECTIONAL)]))
    assert set(bias.rows) == {0}
    bias.update_state(BatchUpdate(2, [], [], [(1, 0, MoveDirectionality.UNIDIRECTIONAL)]))
    assert not bias.rows
