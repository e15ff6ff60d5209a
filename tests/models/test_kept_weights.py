"""Weights that an earlier start left, as the native kernels read them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as QuantType

from jubako.checkpoint.info import Checkpoint, open_checkpoint
from jubako.config import JubakoConfig
from jubako.kernels.cpu.library import library
from jubako.models import kept_weights, load, weight_image
from jubako.utils import huge_pages
from tests.checkpoint.gguf_files import tiny_model, write_model
from tests.models.harness import PagedRunner, make_config

pytestmark = pytest.mark.skipif(library() is None, reason="the native library is not built")

CPU = torch.device("cpu")
TOKENS = torch.randint(3, 96, (40,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_weights, "MIN_BYTES", 0)
    monkeypatch.setattr(weight_image, "SUM_BYTES", 64 * 1024)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return write(tmp_path / "m.gguf", "gemma3")


def write(path: Path, architecture: str) -> Checkpoint:
    torch.manual_seed(0)
    write_model(path, tiny_model(architecture), architecture, quantise=lambda name: QuantType.Q8_0)
    return open_checkpoint(str(path))


def config_of(checkpoint: Checkpoint, folder: Path | str, quantization: str) -> JubakoConfig:
    return make_config(checkpoint.hf_config).replace(
        model_config={"quantization": quantization},
        device_config={"kernels": "cpu", "weight_cache": str(folder)},
    )


def start(checkpoint: Checkpoint, folder: Path | str, quantization: str = "none") -> Any:
    """A model, and whether its weights were there."""
    loaded = []
    fill = load._fill

    def noted(*arguments: Any) -> None:
        loaded.append(arguments)
        fill(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "_fill", noted)
        config = config_of(checkpoint, folder, quantization)
        model, kept = load.ready_model(config, checkpoint, CPU)
    if kept is not None:
        kept.begin_writing()
        kept.wait()
    return model, not loaded


def logits(model: Any) -> torch.Tensor:
    return PagedRunner(model).step({0: TOKENS})[0]


def images(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.weights"))


@pytest.mark.parametrize("quantization", ["none", "gguf-native", "int8", "int4"])
@pytest.mark.parametrize("architecture", ["gemma3", "llama", "qwen3moe"])
def test_the_second_start_finds_the_weights_and_answers_the_same(
    tmp_path: Path, architecture: str, quantization: str
) -> None:
    checkpoint = write(tmp_path / "m.gguf", architecture)
    folder = tmp_path / "kept"
    first, found = start(checkpoint, folder, quantization)
    assert not found
    second, found = start(checkpoint, folder, quantization)
    assert found
    assert torch.equal(logits(first), logits(second))


def test_weights_that_are_read_instead_of_mapped_are_the_same(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = start(checkpoint, tmp_path)
    monkeypatch.setattr(weight_image, "_WORTH_HUGE_PAGES", 0)
    monkeypatch.setattr(huge_pages, "can_ask", lambda: True)
    monkeypatch.setattr(huge_pages, "bytes_on_huge_pages", lambda address: 0)
    second, found = start(checkpoint, tmp_path)
    assert found
    assert torch.equal(logits(first), logits(second))


def test_other_weights_are_not_taken_for_these(tmp_path: Path, checkpoint: Checkpoint) -> None:
    start(checkpoint, tmp_path)
    # The same size and the same time of change.
    status = checkpoint.path.stat()
    content = bytearray(checkpoint.path.read_bytes())
    content[-1] ^= 1
    checkpoint.path.write_bytes(content)
    os.utime(checkpoint.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not start(open_checkpoint(str(checkpoint.path)), tmp_path)[1]
    # The same content where it was sampled, changed later.
    os.utime(checkpoint.path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert not start(open_checkpoint(str(checkpoint.path)), tmp_path)[1]


def test_the_name_of_a_checkpoint_does_not_matter(tmp_path: Path, checkpoint: Checkpoint) -> None:
    start(checkpoint, tmp_path)
    moved = tmp_path / "other" / "name.gguf"
    moved.parent.mkdir()
    shutil.copy2(checkpoint.path, moved)
    assert start(open_checkpoint(str(moved)), tmp_path)[1]


def test_forms_of_the_same_weights_are_told_apart(tmp_path: Path, checkpoint: Checkpoint) -> None:
    start(checkpoint, tmp_path)
    assert not start(checkpoint, tmp_path, "gguf-native")[1]
    assert len(images(tmp_path)) == 2
    assert start(checkpoint, tmp_path)[1]


def test_other_code_prepares_them_again(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(checkpoint, tmp_path)
    monkeypatch.setattr(kept_weights, "code_fingerprint", lambda *_: "other")
    assert not start(checkpoint, tmp_path)[1]
    assert len(images(tmp_path)) == 1


@pytest.mark.parametrize("place", [0, 0.3, 0.6, -200, -30, -1])
def test_a_changed_file_is_found_and_made_again(
    tmp_path: Path, checkpoint: Checkpoint, place: float, caplog: pytest.LogCaptureFixture
) -> None:
    want = logits(start(checkpoint, tmp_path)[0])
    [path] = images(tmp_path)
    content = bytearray(path.read_bytes())
    content[int(place * len(content)) if isinstance(place, float) else place] ^= 0x10
    path.write_bytes(content)
    model, found = start(checkpoint, tmp_path)
    assert not found
    assert "is damaged" in caplog.text
    assert torch.equal(logits(model), want)
    assert start(checkpoint, tmp_path)[1]


@pytest.mark.parametrize("kept_bytes", [0, 10, 100_000, -1])
def test_a_truncated_file_is_found_and_made_again(
    tmp_path: Path, checkpoint: Checkpoint, kept_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    start(checkpoint, tmp_path)
    [path] = images(tmp_path)
    path.write_bytes(path.read_bytes()[:kept_bytes])
    assert not start(checkpoint, tmp_path)[1]
    assert "is damaged" in caplog.text
    assert start(checkpoint, tmp_path)[1]


def test_an_image_of_another_model_is_refused(tmp_path: Path, checkpoint: Checkpoint) -> None:
    start(checkpoint, tmp_path)
    [path] = images(tmp_path)
    other = write(tmp_path / "other.gguf", "llama")
    model = load.build_model(config_of(other, "off", "none"), CPU)
    with pytest.raises(weight_image.DamagedImageError):
        weight_image.restore_weights(model, path)


def test_off_keeps_nothing(tmp_path: Path, checkpoint: Checkpoint, monkeypatch: Any) -> None:
    monkeypatch.setenv("JUBAKO_CACHE_DIR", str(tmp_path / "cache"))
    start(checkpoint, "off")
    assert not (tmp_path / "cache").exists()
    start(checkpoint, "auto")
    assert len(images(tmp_path / "cache" / "weights")) == 1


def test_a_place_that_cannot_be_written_is_a_warning(
    tmp_path: Path, checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    start(checkpoint, tmp_path / "file")
    assert "Nothing is kept" in caplog.text
