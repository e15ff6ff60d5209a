"""A configuration file: options by the names of their flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from jubako.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from jubako.config.file import file_values
from jubako.entrypoints.cli import build_parser
from jubako.errors import ConfigError

CONCERNS = (ModelConfig, CacheConfig, SchedulerConfig, ServerConfig)


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "jubako.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_values_come_with_their_types(write) -> None:
    path = write(
        "max-model-len: 4096\nport: 9000\nenable_prefix_caching: false\ndrain-timeout: 2\n"
        "max-body-bytes: 2MiB\nallowed-origins: [http://a, http://b]\napi-key: '123'\n"
    )
    assert file_values(path, CONCERNS, env={}) == {
        "max_model_len": 4096,
        "port": 9000,
        "enable_prefix_caching": False,
        "drain_timeout": 2,
        "max_body_bytes": 2 * 1024 * 1024,
        "allowed_origins": ("http://a", "http://b"),
        "api_key": "123",
    }


def test_an_empty_file_sets_nothing(write) -> None:
    assert file_values(write("# nothing\n"), CONCERNS, env={}) == {}


def test_the_environment_stands_above_the_file(write) -> None:
    path = write("port: 9000\nmax-model-len: 64\n")
    values = file_values(path, CONCERNS, env={"JUBAKO_PORT": "1"})
    assert values == {"max_model_len": 64}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 1", "did you mean 'port'"),
        ("- port", "must hold options"),
        ("a: [", "is not YAML"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
        ("max-body-bytes: many", "is not a size"),
        ("x: " + "[" * 100_000, "is not YAML"),
    ],
    ids=lambda value: value[:20],
)
def test_a_file_that_cannot_be_used_says_why(write, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        file_values(write(text), CONCERNS, env={})


def test_a_missing_file_says_so() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        file_values("/nowhere.yaml", CONCERNS)


def test_a_command_takes_the_file_below_its_flags(write, monkeypatch) -> None:
    monkeypatch.delenv("JUBAKO_PORT", raising=False)
    path = write("port: 9000\nmax-model-len: 64\nmodel: from-file\n")
    args = build_parser().parse_args(["serve", "--config", path, "--max-model-len", "32"])
    assert (args.port, args.max_model_len, args.model) == (9000, 32, "from-file")


def test_a_command_skips_what_it_does_not_have(write) -> None:
    args = build_parser().parse_args(["generate", "hi", f"--config={write('port: 9000')}"])
    assert not hasattr(args, "port")
