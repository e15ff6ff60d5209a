"""The rules of speech models: equal to transformers' processors, token for token."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from jubako.config import JubakoConfig
from jubako.sampling.logits_processors import AddedRow, BatchUpdate, MoveDirectionality
from jubako.sampling.transcription import TranscriptionLogitsProcessor
from jubako.sampling_params import SamplingParams, TranscriptionRules

END, NO_TIMES, ZERO, VOCAB = 20, 25, 26, 60
SUPPRESSED, NOT_FIRST = [3, 7, 22], [5, END]


def made() -> TranscriptionLogitsProcessor:
    config = JubakoConfig().replace(model_config={"vocab_size": VOCAB})
    return TranscriptionLogitsProcessor(config, torch.device("cpu"))


def params(timestamps: bool) -> SamplingParams:
    return SamplingParams(
        transcription=TranscriptionRules(
            end_token_id=END,
            suppress_tokens=SUPPRESSED,
            begin_suppress_tokens=NOT_FIRST,
            first_timestamp=ZERO if timestamps else None,
        )
    )


def ours(logits: torch.Tensor, prompt: list[int], output: list[int], timestamps: bool) -> None:
    processor = made()
    processor.update_state(BatchUpdate(1, added=[AddedRow(0, params(timestamps), prompt, output)]))
    assert processor.is_active()
    processor.apply(logits)


def theirs(logits: torch.Tensor, ids: list[int], begin: int, timestamps: bool) -> torch.Tensor:
    """Processors in the order in which transformers applies them; `begin` is the first written."""
    config = GenerationConfig(
        no_timestamps_token_id=NO_TIMES, eos_token_id=END, bos_token_id=END, max_length=100
    )
    config.max_initial_timestamp_index = None
    processors = [
        SuppressTokensAtBeginLogitsProcessor(NOT_FIRST, begin),
        SuppressTokensLogitsProcessor(SUPPRESSED),
    ]
    if timestamps:
        processors.append(WhisperTimeStampLogitsProcessor(config, begin_index=begin))
    rows = torch.tensor([ids])
    for processor in processors:
        logits = processor(rows, logits)
    return logits


@settings(deadline=None, max_examples=300)
@given(
    st.booleans(),
    st.lists(st.one_of(st.integers(0, END), st.integers(ZERO, VOCAB - 1)), max_size=6),
    st.integers(0, 10**6),
    st.floats(-6, 6),
)
def test_the_same_tokens_are_left(
    timestamps: bool, output: list[int], seed: int, tilt: float
) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).standard_normal((1, VOCAB)) * 3).float()
    logits[:, ZERO:] += tilt  # so that times are due in about half of the cases
    prompt = [END, 21, 24, ZERO if timestamps else NO_TIMES]
    begin = len(prompt) - timestamps
    wanted = theirs(logits.clone(), prompt + output, begin, timestamps)
    ours(logits, prompt, output, timestamps)
    assert torch.equal(logits, wanted)


def test_a_row_without_rules_is_left_alone_and_rows_move() -> None:
    processor = made()
    output: list[int] = []
    rows = [
        AddedRow(0, SamplingParams(), [1], []),
        AddedRow(1, params(False), [1, NO_TIMES], output),
    ]
    processor.update_state(BatchUpdate(2, added=rows))
    logits = torch.zeros(2, VOCAB)
    processor.apply(logits)
    assert logits[0].isfinite().all()
    assert (~logits[1].isfinite()).nonzero().flatten().tolist() == sorted(SUPPRESSED + NOT_FIRST)
    processor.update_state(BatchUpdate(2, moved=[(0, 1, MoveDirectionality.SWAP)]))
    output.append(4)
    logits = torch.zeros(2, VOCAB)
    processor.apply(logits)
    assert (~logits[0].isfinite()).nonzero().flatten().tolist() == sorted(SUPPRESSED)
    assert logits[1].isfinite().all()
    processor.update_state(BatchUpdate(1, removed=[0]))
    assert not processor.is_active()


def test_only_the_rows_at_hand_are_changed() -> None:
    processor = made()
    processor.update_state(
        BatchUpdate(2, added=[AddedRow(i, params(False), [NO_TIMES], [1]) for i in range(2)])
    )
    logits = torch.zeros(1, VOCAB)
    processor.apply_to(logits, {1: 0})
    assert (~logits[0].isfinite()).sum() == len(SUPPRESSED)


def test_ids_outside_of_the_vocabulary_change_nothing() -> None:
    processor = made()
    rules = TranscriptionRules(end_token_id=END, suppress_tokens=[-1, 2, VOCAB, 10**9])
    added = AddedRow(0, SamplingParams(transcription=rules), [1], [])
    processor.update_state(BatchUpdate(1, added=[added]))
    logits = torch.zeros(1, VOCAB)
    processor.apply(logits)
    assert (~logits[0].isfinite()).nonzero().flatten().tolist() == [2]


def test_rules_survive_the_wire() -> None:
    import msgspec

    sent = msgspec.msgpack.encode(params(True))
    assert msgspec.msgpack.decode(sent, type=SamplingParams) == params(True)
    assert params(True).clone(max_tokens=3).transcription == params(True).transcription
