"""The house: what an import pulls in, and what the public names are."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import jubako

HEAVY = ["torch", "transformers", "numpy", "tokenizers", "zmq", "fastapi", "uvicorn", "jinja2"]


def modules_after(code: str) -> set[str]:
    """Top-level modules loaded by a fresh interpreter that runs `code`."""
    report = "import sys; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], check=True, capture_output=True, text=True
    )
    return set(done.stdout.split("\n")[-2].split())


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import jubako", HEAVY),
        ("from jubako import SamplingParams", HEAVY),
        ("import jubako.kv_cache", ["torch", "transformers"]),
        ("import jubako.scheduler", ["torch", "transformers"]),
        ("from jubako import AsyncLLM", ["torch", "transformers", "fastapi"]),
        ("from jubako import LLM", ["torch", "transformers", "fastapi"]),
        ("import jubako.entrypoints.cli", HEAVY),
    ],
)
def test_an_import_pulls_in_only_what_it_needs(code: str, forbidden: list[str]) -> None:
    assert not modules_after(code) & set(forbidden)


def test_the_front_end_needs_records_of_the_scheduler_only() -> None:
    loaded = "[m for m in sys.modules if m.startswith(('jubako.scheduler.', 'jubako.kv_cache.'))]"
    code = f"import sys, jubako.frontend.llm_engine; print(*{loaded})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    records = ["engine_output", "features", "model_output"]
    assert set(done.stdout.split()) == {
        "jubako.kv_cache.metrics",
        *(f"jubako.scheduler.{name}" for name in records),
    }


@pytest.mark.parametrize("package", ["jubako.kv_cache", "jubako.scheduler"])
def test_a_package_offers_what_it_names(package: str) -> None:
    module = import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = module.nothing_here


def test_public_names_exist() -> None:
    for name in jubako.__all__:
        assert getattr(jubako, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = jubako.nothing_here
