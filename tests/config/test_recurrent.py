"""Which states of recurrent layers are kept follows from the model and from what was asked for."""

from __future__ import annotations

import pytest

from jubako.config import recurrent
from jubako.config.recurrent import resolve_state_caching
from jubako.errors import ConfigError


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "WRITES_BORDERS", {"All": True, "Align": False})


def resolve(
    model: str, caching: bool | None = None, mode: str | None = None, chunked: bool = True
) -> tuple[bool, str]:
    found = resolve_state_caching(
        model,
        enable_prefix_caching=caching,
        mamba_cache_mode=mode,
        enable_chunked_prefill=chunked,
    )
    return found.enable_prefix_caching, found.mamba_cache_mode


def test_prefixes_are_kept_as_well_as_the_model_can() -> None:
    assert resolve("All") == (True, "all")
    assert resolve("Align") == (True, "align")
    assert resolve("Other") == (True, "none")


def test_states_follow_prefix_caching() -> None:
    assert resolve("All", caching=False) == (False, "none")
    assert resolve("Other", caching=False) == (False, "none")
    assert resolve("All", caching=True) == (True, "all")


def test_prefix_caching_follows_states() -> None:
    assert resolve("All", mode="none") == (False, "none")
    assert resolve("All", mode="align") == (True, "align")


def test_chunks_are_needed_to_align_states() -> None:
    assert resolve("Align", chunked=False) == (False, "none")
    assert resolve("All", chunked=False) == (True, "all")
    with pytest.raises(ConfigError, match="enable_chunked_prefill"):
        resolve("All", mode="align", chunked=False)
    with pytest.raises(ConfigError, match="enable_chunked_prefill"):
        resolve("Align", caching=True, chunked=False)


@pytest.mark.parametrize(
    ("model", "caching", "mode", "message"),
    [
        ("Other", None, "align", "Other has no recurrent layers"),
        ("Align", None, "all", "use align"),
        ("All", True, "none", "set mamba_cache_mode to all or align"),
        ("All", False, "align", "enable_prefix_caching"),
    ],
)
def test_contradictions_are_refused(
    model: str, caching: bool | None, mode: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(model, caching, mode)
