"""Where no native library can be built, PyTorch's operators must be as exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jubako.engine.client import InprocClient
from jubako.worker.worker import Worker
from tests.exactness import columns
from tests.exactness.subject import Subject


@pytest.mark.parametrize("row", ["gemma3", "llama"])
def test_batches_and_hits(row: str, subject_of: Callable[[str], Subject]) -> None:
    subject = subject_of(row)
    client = subject.engine(kernels="reference").llm_engine.client
    assert isinstance(client, InprocClient)
    worker = client.core.executor.worker
    assert isinstance(worker, Worker)
    packed = [m for m in worker.model_runner.model.modules() if getattr(m, "packed", None)]
    assert not packed, "the reference takes weights as they are"
    columns.batched(subject, kernels="reference")
