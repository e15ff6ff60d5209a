"""The stand-in engine of these tests has the interface of the real one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from jubako.frontend.async_llm import AsyncLLM
from jubako.frontend.tokenizer import Tokenizer
from tests.serving.fake_engine import FakeAsyncLLM, FakeTokenizer

METHODS = ["generate", "abort", "check_health", "reset_prefix_cache", "shutdown"]
PROPERTIES = ["errored", "dead_error", "num_unfinished_requests"]


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_the_same_arguments(name: str) -> None:
    real, fake = parameters(getattr(AsyncLLM, name)), parameters(getattr(FakeAsyncLLM, name))
    for argument, parameter in fake.items():
        assert argument in real, argument
        assert real[argument].kind == parameter.kind, argument
        assert (real[argument].default is parameter.empty) <= (parameter.default is parameter.empty)
    for argument in real.keys() - fake.keys():
        assert real[argument].default is not inspect.Parameter.empty, argument


def gives_a_generator(function: Any) -> bool:
    """Whether a call makes an asynchronous generator, here or further in."""
    named = str(inspect.signature(function).return_annotation).startswith("AsyncGenerator")
    return named and not inspect.iscoroutinefunction(function)


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_coroutines_where_the_real_ones_are(name: str) -> None:
    real, fake = getattr(AsyncLLM, name), getattr(FakeAsyncLLM, name)
    assert inspect.iscoroutinefunction(real) == inspect.iscoroutinefunction(fake)
    assert gives_a_generator(real) == gives_a_generator(fake)


def test_what_is_looked_up_exists() -> None:
    source = inspect.getsource(AsyncLLM)
    for name in PROPERTIES:
        assert isinstance(getattr(AsyncLLM, name), property)
    for name in ("config", "tokenizer", "stat_loggers"):
        assert f"self.{name}" in source


@pytest.mark.parametrize("name", ["encode", "decode", "id_to_token", "apply_chat_template"])
def test_the_tokenizer_takes_the_same_arguments(name: str) -> None:
    real, fake = parameters(getattr(Tokenizer, name)), parameters(getattr(FakeTokenizer, name))
    named = {n for n, p in fake.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    for argument in named & {"add_special_tokens", "skip_special_tokens", "add_generation_prompt",
                             "continue_final_message", "chat_template"}:  # fmt: skip
        assert argument in real
        assert real[argument].default == fake[argument].default


def test_the_tokenizer_has_the_same_attributes() -> None:
    for name in ("chat_template", "max_token_id", "eos_token_id", "bos_token_id", "backend"):
        assert hasattr(FakeTokenizer, name)
        assert name in inspect.getsource(Tokenizer)
