"""The command line: what is printed where, and the exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from jubako import __version__
from jubako.entrypoints.cli import main
from jubako.errors import ModelNotFoundError
from jubako.kernels.registry import available
from jubako.sampling_params import RequestOutputKind
from tests.entrypoints.fake_llm_engine import FakeLLMEngine, dead
from tests.serving.fake_engine import FakeTokenizer

Capture = pytest.CaptureFixture[str]


class Terminal(io.StringIO):
    """Text that pretends to be typed."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    for name in [name for name in os.environ if name.startswith("JUBAKO_")]:
        monkeypatch.delenv(name)


def engine() -> FakeLLMEngine:
    return FakeLLMEngine.instances[-1]


def run(*arguments: str) -> int:
    """The exit code of a command, whichever way it ends."""
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def check_error(capsys: Capture, said: str) -> None:
    """One clear line on standard error, and nothing on standard output."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("jubako: error: ")
    assert said in err


# -- what needs no model ----------------------------------------------------------------------


def test_version(capsys: Capture) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"jubako {__version__}\n"


@pytest.mark.parametrize("command", ["generate", "complete", "chat", "serve", "doctor"])
def test_help_shows_the_flags(capsys: Capture, command: str) -> None:
    assert run(command, "--help") == 0
    out = capsys.readouterr().out
    if command != "doctor":
        assert "--max-model-len" in out
        assert "--kv-cache-memory-bytes" in out
    assert ("--temperature" in out) == (command in ("generate", "complete", "chat"))
    assert ("--api-key" in out) == (command == "serve")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["generate", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from jubako.entrypoints.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'fastapi', 'uvicorn', 'zmq', 'jinja2', 'gguf'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["fly"], "'fly'"),
        (["generate", "--no-such-flag", "x"], "--no-such-flag"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens"),
        (["generate", "x", "--max-tokens", "ten"], "'ten'"),
        (["generate", "x", "--temperature", "-1"], "temperature"),
        (["generate", "x", "--top-p", "2"], "top_p"),
        (["generate", "x", "--stop", ""], "stop"),
        (["generate", "x", "--dtype", "float8"], "'float8'"),
        (["generate", "x", "--block-size", "0"], "block_size=0"),
        (["generate", "x", "--kv-cache-memory-bytes", "much"], "'much'"),
        (["generate", "x", "--logprobs", "2"], "--json"),
        (["generate"], "No prompt"),
        (["chat", "--n", "2"], "--n"),
        (["serve", "--port", "99999"], "port=99999"),
        (["serve", "--host", "no such host"], "'no such host'"),
        (["serve", "--max-body-bytes", "0"], "max_body_bytes=0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_option_is_said_in_one_line(
    capsys: Capture, fake_engine: type[FakeLLMEngine], arguments: list[str], said: str
) -> None:
    assert run(*arguments) == 2
    check_error(capsys, said)
    assert fake_engine.instances == []


def test_a_bad_environment_variable_is_named(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUBAKO_PORT", "eighty")
    assert run("serve") == 2
    check_error(capsys, "JUBAKO_PORT")
    # Commands without that option do not mind.
    assert run("--version") == 0


def test_doctor(capsys: Capture) -> None:
    assert run("doctor") == 0
    out = capsys.readouterr().out
    for name in ("processor", "instruction sets", "memory", "torch", "kernels", "default model"):
        assert name in out
    assert run("collect-env", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["jubako"] == __version__
    assert report["machine"]["cores"] >= 1
    assert report["libraries"]["torch"]
    assert report["compute"]["kernels_used"] == available()[0]
    assert report["problems"] == []


def test_doctor_says_what_is_missing(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from jubako.entrypoints.commands import doctor

    monkeypatch.setattr(doctor, "LIBRARIES", (*doctor.LIBRARIES, "no-such-library"))
    assert run("doctor") == 1
    assert "no-such-library is not installed" in capsys.readouterr().out


# -- generate ---------------------------------------------------------------------------------


def test_text_goes_out_and_the_speed_beside_it(
    capsys: Capture, fake_engine: type[FakeLLMEngine]
) -> None:
    assert run("generate", "hello") == 0
    out, err = capsys.readouterr()
    assert out == "hello\n"
    assert re.fullmatch(
        r"loaded in [\d.]+ s, first token [\d.]+ s later, 5 tokens at [\d.]+ tokens/s\n", err
    )
    assert engine().multiprocess
    assert engine().shut_down
    ((_, params, _),) = engine().seen
    assert params.output_kind is RequestOutputKind.DELTA


def test_text_is_written_as_it_comes(
    monkeypatch: pytest.MonkeyPatch, fake_engine: type[FakeLLMEngine]
) -> None:
    flushed: list[str] = []

    class Out(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Out())
    assert run("generate", "abc") == 0
    assert flushed[:3] == ["a", "ab", "abc\n"]


def test_several_prompts_in_order(capsys: Capture, fake_engine: type[FakeLLMEngine]) -> None:
    assert run("generate", "abc", "d", "ef", "--n", "2") == 0
    assert capsys.readouterr().out == "abc\nabc\nd\nd\nef\nef\n"


def test_prompts_from_standard_input(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, fake_engine: type[FakeLLMEngine]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\r\n"))
    assert run("generate", "first", "-") == 0
    assert capsys.readouterr().out == "first\none\ntwo\n"


def test_without_a_prompt_on_a_terminal_nothing_waits(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("typed"))
    assert run("generate") == 2
    check_error(capsys, "No prompt")


def test_json_has_one_object_a_line(capsys: Capture, fake_engine: type[FakeLLMEngine]) -> None:
    assert run("generate", "abc", "日本", "--json", "--n", "2", "--logprobs", "1") == 0
    out, err = capsys.readouterr()
    assert err == ""
    records = [json.loads(line) for line in out.splitlines()]
    assert [(r["prompt_index"], r["index"], r["text"]) for r in records] == [
        (0, 0, "abc"),
        (0, 1, "abc"),
        (1, 0, "日本"),
        (1, 1, "日本"),
    ]
    record = records[0]
    assert len(record["prompt_token_ids"]) == 4
    assert record["token_ids"] == record["prompt_token_ids"][1:]
    assert record["finish_reason"] == "stop"
    assert record["num_cached_tokens"] == 2
    assert record["timings"] == {
        "time_to_first_token": 1.25,
        "queue": 0.5,
        "prefill": 0.5,
        "decode": 1.0,
        "tokens_per_second": 2.0,
    }
    # JSON has no infinity.
    assert record["logprobs"][0][0]["logprob"] == -9999.0


def test_one_bad_prompt_does_not_end_the_others(
    capsys: Capture, fake_engine: type[FakeLLMEngine]
) -> None:
    assert run("generate", "a", "x" * 200, "b", "--json") == 1
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r.get("text") for r in records] == ["a", None, "b"]
    assert records[1]["error"]["code"] == "context_length_exceeded"
    assert run("generate", "a", "x" * 200, "b") == 1
    out, err = capsys.readouterr()
    assert out == "a\nb\n"
    assert err.startswith("jubako: error: prompt 2: The prompt is too long.\n")


def test_flags_beat_the_models_settings_which_beat_neutral_ones(
    fake_engine: type[FakeLLMEngine],
) -> None:
    assert run("generate", "a") == 0
    ((_, params, _),) = engine().seen
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 64, 128)
    flags = ["--temperature", "0.9", "--max-tokens", "3", "--stop", "x", "--stop", "y"]
    assert run("generate", "a", *flags, "--ignore-eos", "--seed", "7", "--stop-token-ids", "5") == 0
    ((_, params, _),) = engine().seen
    assert (params.temperature, params.top_k, params.max_tokens) == (0.9, 64, 3)
    assert (params.stop, params.stop_token_ids) == (["x", "y"], [5])
    assert params.ignore_eos
    assert params.seed == 7


def test_engine_flags_and_variables_reach_the_engine(
    monkeypatch: pytest.MonkeyPatch, fake_engine: type[FakeLLMEngine]
) -> None:
    monkeypatch.setenv("JUBAKO_MAX_MODEL_LEN", "77")
    monkeypatch.setenv("JUBAKO_BLOCK_SIZE", "8")
    size = "--kv-cache-memory-bytes=1GiB"
    assert run("generate", "a", "--model", "m", "--block-size", "16", size) == 0
    config = engine().config
    assert config.model_config.model == "m"
    assert config.model_config.max_model_len == 77
    assert config.cache_config.block_size == 16
    assert config.cache_config.kv_cache_memory_bytes == 2**30
    # A command that prints text does not chat about itself.
    assert config.observability_config.log_level == "warning"


# -- what goes wrong --------------------------------------------------------------------------


class Broken:
    """An engine that does not start."""

    error: BaseException = ModelNotFoundError("There is no model at 'm'.")

    def __init__(self, *args: Any, **options: Any) -> None:
        raise self.error


@pytest.mark.parametrize("command", [["generate", "a"], ["chat"]])
def test_a_failure_is_one_line_and_1(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr("jubako.frontend.llm_engine.LLMEngine", Broken)
    assert run(*command) == 1
    check_error(capsys, "There is no model at 'm'.")
    monkeypatch.setattr(Broken, "error", ZeroDivisionError("oops"))
    assert run(*command) == 1
    check_error(capsys, "ZeroDivisionError: oops")
    monkeypatch.setattr(Broken, "error", KeyboardInterrupt())
    assert run(*command) == 130


def test_the_traceback_is_there_for_who_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jubako.frontend.llm_engine.LLMEngine", Broken)
    monkeypatch.setenv("JUBAKO_LOG_LEVEL", "debug")
    with pytest.raises(ModelNotFoundError):
        main(["generate", "a"])


@pytest.mark.parametrize(("error", "code"), [(dead(), 1), (KeyboardInterrupt(), 130)], ids=repr)
def test_an_engine_that_fails_in_the_middle(
    monkeypatch: pytest.MonkeyPatch,
    fake_engine: type[FakeLLMEngine],
    error: BaseException,
    code: int,
) -> None:
    def step(self: FakeLLMEngine) -> None:
        raise error

    monkeypatch.setattr(FakeLLMEngine, "step", step)
    assert run("generate", "a") == code
    assert engine().shut_down


# -- chat -------------------------------------------------------------------------------------


def chat(monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return run("chat", *arguments)


def prompts() -> list[str]:
    return [prompt["prompt"] for prompt, _, _ in engine().seen]


def test_a_chat_remembers(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, fake_engine: type[FakeLLMEngine]
) -> None:
    assert chat(monkeypatch, "hi\n\nyo\n", "--max-tokens", "3", "--system-prompt", "be") == 0
    assert capsys.readouterr().out == "<sy\n<sy\n"
    first = "<system>be<user>hi<assistant>"
    assert prompts() == [first, first + "<sy<user>yo<assistant>"]
    assert engine().shut_down


def test_a_chat_is_reset_and_ended(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, fake_engine: type[FakeLLMEngine]
) -> None:
    assert chat(monkeypatch, "hi\n/reset\nyo\n/quit\nmore\n", "--max-tokens", "3") == 0
    assert prompts() == ["<user>hi<assistant>", "<user>yo<assistant>"]
    assert capsys.readouterr().err == ""


def test_an_interrupt_stops_the_answer_and_not_the_chat(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, fake_engine: type[FakeLLMEngine]
) -> None:
    monkeypatch.setattr(FakeLLMEngine, "__init__", _interrupted_at_3(FakeLLMEngine.__init__))
    assert chat(monkeypatch, "hi\nyo\n") == 0
    assert prompts() == ["<user>hi<assistant>", "<user>hi<assistant><u<user>yo<assistant>"]
    assert engine().aborted == ["0"]
    assert capsys.readouterr().out.startswith("<u\n<user>hi")


def _interrupted_at_3(init: Any) -> Any:
    def interrupted(self: FakeLLMEngine, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.fail_at_step = {3: KeyboardInterrupt()}

    return interrupted


def test_a_message_that_is_refused_is_forgotten(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, fake_engine: type[FakeLLMEngine]
) -> None:
    assert chat(monkeypatch, "x" * 200 + "\nyo\n", "--max-tokens", "3") == 1
    out, err = capsys.readouterr()
    assert out == "<us\n"
    assert err == ("jubako: error: The prompt is too long. /reset forgets the conversation.\n")
    assert prompts() == ["<user>yo<assistant>"]


def test_a_model_that_cannot_chat(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, fake_engine: type[FakeLLMEngine]
) -> None:
    monkeypatch.setattr(FakeTokenizer, "chat_template", None)
    assert chat(monkeypatch, "hi\n") == 1
    check_error(capsys, "no chat template")
    assert engine().shut_down


def test_a_chat_in_a_terminal(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, fake_engine: type[FakeLLMEngine]
) -> None:
    typed: list[Any] = ["hi", KeyboardInterrupt(), "/help", EOFError()]

    def read(prompt: str) -> str:
        assert prompt == "> "
        item = typed.pop(0)
        if isinstance(item, BaseException):
            raise item
        return str(item)

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", Terminal())
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    assert run("chat", "--max-tokens", "3") == 0
    assert out.getvalue().startswith("<us\n")
    assert capsys.readouterr().err.count("Ctrl-C stops an answer") == 2
    assert typed == []


# -- serve ------------------------------------------------------------------------------------


def test_serve_takes_the_model_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Server:
        def __init__(self, config: Any, start_engine: Any, listener: Any) -> None:
            seen.extend([config, start_engine])
            listener.close()

        def run(self) -> int:
            return 3

    class Engine:
        @classmethod
        def from_config(cls, config: Any) -> Any:
            return config

    monkeypatch.setattr("jubako.entrypoints.server.run.HttpServer", Server)
    monkeypatch.setattr("jubako.frontend.async_llm.AsyncLLM", Engine)
    assert run("serve", "m", "--model", "other", "--port", "0", "--api-key", "k") == 3
    config, start_engine = seen
    assert config.api_key == "k"
    assert config.host == "127.0.0.1"
    engine_config = start_engine()
    assert engine_config.model_config.model == "m"
    assert engine_config.observability_config.log_level == "info"


# -- standard streams that are closed ---------------------------------------------------------

WRITES = """
import os, sys
from jubako.entrypoints import cli
from jubako.entrypoints.commands import doctor
def run(args):
    assert sys.stdin.readline() == ""
    print("out"); print("err", file=sys.stderr)
    opened = os.open(os.devnull, os.O_RDONLY)
    assert opened > 2, opened
    return 0
doctor.run = run
code = cli.main(["doctor"])
os._exit(code)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_an_empty_one(closed: str) -> None:
    """And its number goes to no socket, which what is printed would then reach."""
    result = subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, WRITES],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ("" if " >&-" in f" {closed}" else "out\n")
    assert result.stderr == ("" if "2>&-" in closed else "err\n")


def test_what_the_terminal_cannot_show_is_escaped(
    fake_engine: type[FakeLLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in ([], ["--json"]):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
        assert run("generate", "é€", *options) == 0
        text = raw.getvalue().decode("ascii")
        if options:
            assert json.loads(text)["text"] == "é€"
        else:
            assert text == "\\xe9\\u20ac\n"
