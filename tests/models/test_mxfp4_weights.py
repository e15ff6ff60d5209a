"""Checkpoints with MXFP4 experts load as the values that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jubako.checkpoint.info import open_checkpoint
from jubako.errors import CheckpointError
from jubako.models.load import load_model
from jubako.models.loader import load_weights, mxfp4_weights

from .families.gpt_oss import packable_config
from .harness import PagedRunner, make_config

Weights = dict[str, torch.Tensor]
NAME = "model.layers.0.mlp.experts.gate_up_proj"


def random_packed(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [*shape, 16] and scales [*shape]."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(121, 127, shape, generator=generator, dtype=torch.uint8)
    return blocks, scales


def write(folder: Path, tensors: Weights, config: dict[str, Any] | None = None) -> Path:
    save_file(tensors, folder / "model.safetensors")
    text = json.dumps({**(config or {}), "quantization_config": {"quant_method": "mxfp4"}})
    (folder / "config.json").write_text(text)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return dict(load_weights(open_checkpoint(str(folder)), dtype))


def test_every_code_has_its_value(tmp_path: Path) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes | (15 - codes) << 4).view(1, 1, 1, 16)
    scales = torch.full((1, 1, 1), 128, dtype=torch.uint8)
    got = load(write(tmp_path, {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}))[NAME]
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert got.shape == (1, 32, 1)
    assert got.flatten()[::2].tolist() == [2 * v for v in values]
    assert got.flatten()[1::2].tolist() == [2 * v for v in reversed(values)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(mxfp4_weights, "CHUNK_BLOCKS", 7)
    blocks, scales = random_packed(3, 10, 2)
    other = torch.randn(4, 5)
    tensors = {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales, "other": other}
    got = load(write(tmp_path, tensors), dtype)
    assert got.keys() == {NAME, "other"}
    assert got[NAME].dtype == dtype
    assert torch.equal(got[NAME], convert_moe_packed_tensors(blocks, scales, dtype=dtype))
    assert torch.equal(got["other"], other.to(dtype))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{NAME}_blocks": torch.zeros(1, 2, 3, 16, dtype=torch.uint8)}, "not.*_scales"),
        ({f"{NAME}_scales": torch.zeros(1, 2, 3, dtype=torch.uint8)}, "not.*_blocks"),
        ({"mask": torch.zeros(3, dtype=torch.uint8)}, "'mask'"),
        (
            {
                f"{NAME}_blocks": torch.zeros(1, 2, 3, 16, dtype=torch.uint8),
                f"{NAME}_scales": torch.zeros(1, 2, 2, dtype=torch.uint8),
            },
            r"\[1, 2, 3, 16\].*\[1, 2, 2\]",
        ),
        (
            {
                f"{NAME}_blocks": torch.zeros(1, 2, 3, 8, dtype=torch.uint8),
                f"{NAME}_scales": torch.zeros(1, 2, 3, dtype=torch.uint8),
            },
            r"\[1, 2, 3, 8\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, tensors: Weights, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(write(tmp_path, tensors))


def test_a_model_with_packed_experts(tmp_path: Path) -> None:
    """gpt-oss as it is published gives the logits of transformers with the expanded weights."""
    torch.manual_seed(0)
    reference = GptOssForCausalLM(packable_config()).eval()
    tensors = {name: t.clone() for name, t in reference.state_dict().items()}
    for seed, name in enumerate([n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]):
        experts, size, rows = tensors[name].shape
        blocks, scales = random_packed(experts, rows, size // 32, seed=seed)
        scales -= 3
        packed = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        reference.get_parameter(name).data.copy_(packed)
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    config = {**reference.config.to_dict(), "architectures": ["GptOssForCausalLM"]}
    checkpoint = open_checkpoint(str(write(tmp_path, tensors, config)))
    model = load_model(make_config(checkpoint.hf_config), checkpoint, torch.device("cpu"))
    tokens = list(range(3, 60))
    with torch.no_grad():
        want = reference(torch.tensor([tokens])).logits[0]
    got = PagedRunner(model).step({0: tokens})[0]
    assert (got - want).abs().max() < 1e-4 * want.abs().max()
