"""Weights that the native kernels hold in fewer bits: GGUF's own blocks, int8 and int4."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as QuantType

from jubako.checkpoint.info import Checkpoint, open_checkpoint
from jubako.config import JubakoConfig
from jubako.errors import ConfigError
from jubako.kernels.cpu.library import library
from jubako.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from jubako.layers.weights import StoredBlocks
from jubako.models.load import load_model, pack_weights
from jubako.models.loader import gguf_weights, load_weights
from tests.checkpoint.gguf_files import ARCHITECTURES, tiny_model, write_model
from tests.models.harness import PagedRunner, make_config

pytestmark = pytest.mark.skipif(library() is None, reason="the native library is not built")

TYPES = (QuantType.Q8_0, QuantType.Q5_0, QuantType.Q4_0, QuantType.Q5_1, QuantType.Q4_1)
TOKENS = torch.randint(3, 96, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def mixed(name: str) -> QuantType:
    """A type for each tensor, neighbours in one layer of different ones."""
    return TYPES[zlib.crc32(name.encode()) % len(TYPES)]


def alike(name: str) -> QuantType:
    """Gate and up of one type, so that they can lie beside each other."""
    return QuantType.Q5_0 if "ffn_" in name else mixed(name)


def config_of(checkpoint: Checkpoint, quantization: str, kernels: str = "cpu") -> JubakoConfig:
    return make_config(checkpoint.hf_config).replace(
        model_config={"quantization": quantization}, device_config={"kernels": kernels}
    )


def load(checkpoint: Checkpoint, quantization: str) -> Any:
    model = load_model(config_of(checkpoint, quantization), checkpoint, torch.device("cpu"))
    pack_weights(model, quantization)
    return model


def logits(model: Any) -> torch.Tensor:
    return PagedRunner(model).step({0: TOKENS})[0]


def write(folder: Path, architecture: str, quantise: Any) -> Checkpoint:
    model = tiny_model(architecture)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.4)  # else softmaxes have one value, and rounding decides which
    write_model(folder / "m.gguf", model, architecture, quantise=quantise)
    return open_checkpoint(str(folder))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("quantise", [mixed, alike])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_files_own_blocks_answer_as_expanded_ones(
    tmp_path: Path, architecture: str, quantise: Any
) -> None:
    checkpoint = write(tmp_path, architecture, quantise)
    want = logits(load(checkpoint, "none"))
    assert relative_error(logits(load(checkpoint, "gguf-native")), want) < 0.03


def test_blocks_are_kept_and_no_second_copy_of_them(tmp_path: Path) -> None:
    model = load(write(tmp_path, "llama", alike), "gguf-native")
    layers = [
        m for m in model.modules() if isinstance(m, QKVParallelLinear | MergedColumnParallelLinear)
    ]
    assert layers
    for layer in layers:
        assert all(kind.startswith("Q") for kind in layer.packed.kinds), layer.packed.kinds
        assert layer.weight.numel() == 0
        assert not layer._blocks


@pytest.mark.parametrize(("quantization", "limit"), [("int8", 0.03), ("int4", 0.5)])
@pytest.mark.parametrize("architecture", ["gemma3", "llama", "qwen3moe"])
def test_floats_in_fewer_bits_stay_close(
    tmp_path: Path, architecture: str, quantization: str, limit: float
) -> None:
    checkpoint = write(tmp_path, architecture, lambda name: QuantType.F32)
    want = logits(load(checkpoint, "none"))
    error = relative_error(logits(load(checkpoint, quantization)), want)
    assert 0 < error < limit


def test_fewer_bits_need_the_native_kernels(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, "llama", alike)
    config = config_of(checkpoint, "int8", "reference")
    with pytest.raises(ConfigError, match="quantization='int8' needs the native kernels"):
        load_model(config, checkpoint, torch.device("cpu"))


def test_only_a_gguf_file_has_blocks_of_its_own(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    with pytest.raises(ConfigError, match="needs a GGUF file"):
        load(checkpoint, "gguf-native")


@pytest.mark.parametrize("quantization", ["gguf-native", "int8", "int4"])
def test_fewer_bits_need_a_dtype_that_products_take(tmp_path: Path, quantization: str) -> None:
    checkpoint = write(tmp_path, "llama", alike)
    config = config_of(checkpoint, quantization).replace(model_config={"dtype": "float16"})
    with pytest.raises(ConfigError, match="bfloat16 or float32, not in float16"):
        load_model(config, checkpoint, torch.device("cpu"))


def test_blocks_without_a_packed_layout_are_expanded_as_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write(tmp_path, "llama", lambda name: QuantType.Q5_0)

    def weights() -> dict[str, Any]:
        return dict(load_weights(checkpoint, torch.float32, keep_blocks=True))

    kept = weights()
    assert any(isinstance(weight, StoredBlocks) for weight in kept.values())
    monkeypatch.setattr(gguf_weights, "GGUF_KINDS", ("Q8_0",))
    for name, weight in weights().items():
        assert isinstance(weight, torch.Tensor)
        own = kept[name]
        if isinstance(own, StoredBlocks):
            monkeypatch.setattr(gguf_weights, "CHUNK_ELEMENTS", 96)  # several pieces
            own = own.expand(own.data)
        assert torch.equal(own, weight)
