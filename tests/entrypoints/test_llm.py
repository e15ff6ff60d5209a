"""The Python class: what goes in, what comes out, and what happens when something goes wrong."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest

from jubako import LLM, SamplingParams
from jubako.errors import ConfigError, EngineDeadError, JubakoError, ValidationError
from jubako.sampling_params import RequestOutputKind
from tests.entrypoints.fake_llm_engine import FakeLLMEngine, dead
from tests.serving.fake_engine import FakeTokenizer


@pytest.fixture
def llm(fake_engine: type[FakeLLMEngine]) -> LLM:
    return LLM(max_num_seqs=4)


def engine_of(llm: LLM) -> FakeLLMEngine:
    return llm.llm_engine  # type: ignore[return-value]


def ids(text: str) -> list[int]:
    return FakeTokenizer().encode(text)


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


# -- options ----------------------------------------------------------------------------------


def test_options_become_the_configuration(fake_engine: type[FakeLLMEngine]) -> None:
    llm = LLM("a/model", dtype="float32", block_size=8, stream_interval=3, seed=7)
    config = engine_of(llm).config
    assert config.model_config.model == "a/model"
    assert config.model_config.dtype == "float32"
    assert config.model_config.seed == 7
    assert config.cache_config.block_size == 8
    assert config.scheduler_config.stream_interval == 3
    assert not engine_of(llm).multiprocess


def test_an_unknown_option_is_named(fake_engine: type[FakeLLMEngine]) -> None:
    with pytest.raises(ConfigError, match="'max_model_length'"):
        LLM(max_model_length=5)
    with pytest.raises(ConfigError, match="block_size=0"):
        LLM(block_size=0)


# -- prompts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts",
    [
        "abc",
        ids("abc"),
        {"prompt": "abc"},
        {"prompt_token_ids": ids("abc")},
        ["abc"],
        [ids("abc")],
        [{"prompt": "abc"}],
        ("abc",),
    ],
    ids=repr,
)
def test_one_prompt_in_every_form(llm: LLM, prompts: Any) -> None:
    assert texts(llm.generate(prompts)) == ["abc"]


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["abcd", ids("x"), {"prompt": "yz"}, {"prompt_token_ids": ids("abc")}]
    assert texts(llm.generate(prompts)) == ["abcd", "x", "yz", "abc"]
    assert texts(llm.generate(["second", "call"])) == ["second", "call"]


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    "prompts", [5, None, [1, "a"], ["a", 1], [None], [1.5], [b"a"], b"a", bytearray(b"a")], ids=repr
)
def test_what_is_no_prompt(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ValidationError) as error:
        llm.generate(prompts)
    assert error.value.parameter == "prompts"
    assert engine_of(llm).requests == {}


# -- parameters -------------------------------------------------------------------------------


def test_one_set_of_parameters_is_for_all(llm: LLM) -> None:
    assert texts(llm.generate(["abc", "de"], SamplingParams(max_tokens=1))) == ["a", "d"]


def test_parameters_and_priorities_for_each(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=1)]
    assert texts(llm.generate(["abc", "de"], params, priority=[3, -1])) == ["ab", "d"]
    assert [priority for _, _, priority in engine_of(llm).seen] == [3, -1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"sampling_params": [SamplingParams()]},
        {"sampling_params": []},
        {"sampling_params": "hot"},
        {"priority": [1, 2, 3]},
        {"priority": 1.5},
    ],
    ids=repr,
)
def test_what_cannot_be_paired(llm: LLM, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        llm.generate(["a", "b"], **arguments)
    assert error.value.parameter in arguments
    assert engine_of(llm).seen == []


def test_the_callers_parameters_are_not_touched(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, stop=["x"])
    llm.generate(["abc", "de"], params)
    assert params == SamplingParams(max_tokens=2, stop=["x"])
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    for _, used, _ in engine_of(llm).seen:
        assert used is not params
        assert used.output_kind is RequestOutputKind.FINAL_ONLY


def test_without_parameters_the_model_decides(llm: LLM) -> None:
    llm.generate("abc")
    (_, used, _), *_ = engine_of(llm).seen
    assert (used.temperature, used.top_k, used.max_tokens) == (0.5, 64, 16)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=64)


# -- what goes wrong --------------------------------------------------------------------------


def test_all_prompts_are_accepted_or_none(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="empty"):
        llm.generate(["abc", "de", ""])
    assert engine_of(llm).requests == {}
    assert engine_of(llm).steps == 0
    assert texts(llm.generate(["next"])) == ["next"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("x"), dead()], ids=repr)
def test_an_interrupted_call_leaves_nothing_behind(llm: LLM, error: BaseException) -> None:
    engine_of(llm).fail_at_step = {2: error}
    with pytest.raises(type(error)):
        # The first prompt has its answer by then.
        llm.generate(["a", "bcd", "efg"])
    assert engine_of(llm).requests == {}
    assert engine_of(llm).aborted == ["1", "2"]
    assert texts(llm.generate("next")) == ["next"]


# -- chat -------------------------------------------------------------------------------------


def test_a_chat(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "hi"}])
    assert output.outputs[0].text == "<user>hi<assistant>"[:16]
    ((prompt, _, _),) = engine_of(llm).seen
    assert prompt["prompt"] == "<user>hi<assistant>"
    # The template writes the start-of-sequence token itself.
    assert prompt["prompt_token_ids"] == ids("<user>hi<assistant>")[1:]


def test_several_chats(llm: LLM) -> None:
    chats = [[{"role": "user", "content": c}] for c in "ab"]
    outputs = llm.chat(chats, SamplingParams(max_tokens=7), chat_template_kwargs={"k": 1})
    assert texts(outputs) == ["<user>a", "<user>b"]
    assert engine_of(llm).seen[0][0]["prompt"] == "<user>a[k=1]<assistant>"


def test_continuing_a_message(llm: LLM) -> None:
    messages = [{"role": "assistant", "content": "Well"}]
    llm.chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert engine_of(llm).seen[0][0]["prompt"] == "<assistant>Well"


def test_an_empty_chat(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="at least one message"):
        llm.chat([])


@pytest.mark.parametrize(
    "messages", [5, "hi", [5], [[5]], [[]], ["hi"], {"role": "user"}], ids=repr
)
def test_what_is_no_chat(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValidationError) as error:
        llm.chat(messages)
    assert error.value.parameter == "messages"


# -- the rest ---------------------------------------------------------------------------------


def test_housekeeping(fake_engine: type[FakeLLMEngine]) -> None:
    with LLM() as llm:
        assert llm.get_tokenizer() is engine_of(llm).tokenizer
        assert llm.reset_prefix_cache()
        assert llm.get_metrics() == {"generation_tokens": 5}
        assert not engine_of(llm).shut_down
    assert engine_of(llm).shut_down


class Bar:
    """A progress bar that remembers."""

    def __init__(self, **options: Any) -> None:
        self.total = options["total"]
        self.count = 0
        self.closed = False
        self.postfix = ""
        self.format_dict = {"elapsed": 2.0}

    def update(self, count: int) -> None:
        self.count += count

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.postfix = text

    def close(self) -> None:
        self.closed = True


def test_progress_shows_tokens_a_second(llm: LLM) -> None:
    bars: list[Bar] = []

    def make(**options: Any) -> Bar:
        bars.append(Bar(**options))
        return bars[-1]

    llm.generate(["abc", "d"], use_tqdm=make)
    (bar,) = bars
    assert (bar.total, bar.count, bar.closed) == (2, 2, True)
    # 4 + 2 prompt tokens and 3 + 1 generated ones in two seconds.
    assert bar.postfix == "input 3.0 tokens/s, output 2.0 tokens/s"


def test_the_bar_is_closed_when_something_fails(llm: LLM) -> None:
    bar = Bar(total=1)
    engine_of(llm).fail_at_step = {1: RuntimeError()}
    with pytest.raises(RuntimeError):
        llm.generate("abc", use_tqdm=lambda **_: bar)
    assert bar.closed


def test_without_a_terminal_there_is_no_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert not sys.stderr.isatty()
    llm.generate("abc")
    assert capsys.readouterr() == ("", "")


# -- threads ----------------------------------------------------------------------------------


def test_threads_share_one_llm_one_call_at_a_time(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, inside, most = engine_of(llm).step, 0, 0

    def slow_step() -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.001)
        try:
            return step()
        finally:
            inside -= 1

    monkeypatch.setattr(engine_of(llm), "step", slow_step)
    answers: dict[str, list[str]] = {}

    def ask(name: str) -> None:
        answers[name] = texts(llm.generate([name * 3, name * 2]))

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in "abcdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert answers == {name: [name * 3, name * 2] for name in "abcdef"}
    assert most == 1


def test_a_shutdown_ends_a_call_in_another_thread(llm: LLM) -> None:
    seen: list[BaseException] = []
    going = threading.Event()

    def endless() -> list[Any]:
        going.set()
        return []

    engine_of(llm).step = endless  # type: ignore[method-assign]

    def ask() -> None:
        try:
            llm.generate("a")
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert going.wait(10)
    llm.shutdown()
    thread.join(10)
    assert [type(error) for error in seen] == [EngineDeadError]
    assert engine_of(llm).shut_down


def test_a_call_within_a_call_is_refused(llm: LLM) -> None:
    def bar(**options: Any) -> Any:
        return llm.generate("b")

    with pytest.raises(JubakoError, match="within"):
        llm.generate("a", use_tqdm=bar)
    assert texts(llm.generate("c")) == ["c"]
