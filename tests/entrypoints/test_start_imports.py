"""What `jubako generate` must not load, in its own process and in the engine core's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.exactness import oracle

NEVER = (
    "fastapi",
    "gguf",
    "httpx",
    "huggingface_hub",
    "jinja2",
    "matplotlib",
    "openai",
    "prometheus_client",
    "pydantic",
    "scipy",
    "starlette",
    "sympy",
    "transformers",
    "uvicorn",
)
"""Nothing that a generation uses; each would cost the start some 0.1 s or more."""

OPTIONS = ("--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--max-tokens", "2")

FRONT_END = """
import sys
from jubako.entrypoints.cli import main
assert main(["generate", "hello", *sys.argv[1:]]) == 0
print("LOADED", *sys.modules)
"""

CORE = """
import sys
from jubako import LLM, SamplingParams
import jubako.engine.process
with LLM(model=sys.argv[2], dtype="float32", device="cpu", num_threads=1) as llm:
    llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
print("LOADED", *sys.modules)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imports") / "tiny-llama"
    oracle.make_model("llama", folder)
    return folder


def loaded(code: str, model: Path) -> set[str]:
    """The top-level modules of a fresh process after it ran `code`."""
    command = [sys.executable, "-c", code, "--model", str(model), *OPTIONS]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    names = result.stdout.rpartition("LOADED ")[2].split()
    assert "jubako" in names
    return {name.partition(".")[0] for name in names}


def test_the_front_end_loads_only_what_it_uses(model: Path) -> None:
    modules = loaded(FRONT_END, model)
    # The core has PyTorch in a process of its own, and loads it while this one reads the tokeniser.
    assert not modules & {*NEVER, "torch", "safetensors"}


def test_the_core_loads_only_what_it_uses(model: Path) -> None:
    modules = loaded(CORE, model)
    assert "torch" in modules
    assert not modules & set(NEVER)
