"""A front end's process never loads PyTorch or transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "safetensors.torch", "pandas", "PIL", "cv2", "openai", "triton")


def loaded(code: str) -> set[str]:
    """Which of the heavy modules a new interpreter has after running `code`."""
    code += f"\nimport sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(eval(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "module",
    [
        "jubako",
        "jubako.frontend.async_llm",
        "jubako.frontend.llm_engine",
        "jubako.engine.client",
        "jubako.engine.process",
        "jubako.engine.messages",
        "jubako.engine.setup",
        "jubako.engine.core",
    ],
)
def test_an_import_loads_nothing_heavy(module: str) -> None:
    assert loaded(f"import {module}") == set()


def test_a_core_in_its_own_process_leaves_this_one_light(model_folder: Path) -> None:
    options = {
        "model": str(model_folder),
        "device": "cpu",
        "distributed_executor_backend": "tests.engine.fakes.FakeExecutor",
    }
    code = f"""
from jubako.config import JubakoConfig
from jubako.frontend.llm_engine import LLMEngine
from jubako.sampling_params import SamplingParams
engine = LLMEngine(JubakoConfig.from_options({options!r}), multiprocess=True)
engine.add_request("a", "hello", SamplingParams(logprobs=1))
while engine.has_unfinished_requests():
    engine.step()
engine.shutdown()
"""
    assert loaded(code) == set()
