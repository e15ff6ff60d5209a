"""Checkpoints with 8-bit floating-point weights load as the values that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jubako.checkpoint.info import open_checkpoint
from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.models.load import load_model
from jubako.models.loader import fp8_weights, load_weights

from .harness import PagedRunner, make_config
from .tiny import reference_model

Weights = dict[str, torch.Tensor]
E4M3 = torch.float8_e4m3fn


def quantised(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit values and their factors [blocks, blocks], one block after the other."""
    n, m = weight.shape
    scales = torch.zeros(-(-n // block[0]), -(-m // block[1]))
    values = torch.zeros(n, m, dtype=E4M3)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            rows = slice(i * block[0], (i + 1) * block[0])
            columns = slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[rows, columns].abs().max() / 448
            values[rows, columns] = (weight[rows, columns] / scales[i, j]).to(E4M3)
    return values, scales


def dequantised(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    out = values.to(torch.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            rows = slice(i * block[0], (i + 1) * block[0])
            out[rows, j * block[1] : (j + 1) * block[1]] *= scales[i, j]
    return out


def write(
    folder: Path, *files: Weights, block: Any = None, config: dict[str, Any] | None = None
) -> Path:
    quantisation: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if block is not None:
        quantisation["weight_block_size"] = block
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{number}.safetensors")
    text = json.dumps({**(config or {}), "quantization_config": quantisation})
    (folder / "config.json").write_text(text)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return dict(load_weights(open_checkpoint(str(folder)), dtype))


@pytest.mark.parametrize("shape", [(40, 48), (33, 50), (16, 16), (1, 100), (70, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(fp8_weights, "CHUNK_ELEMENTS", 7 * shape[1])
    block = (16, 32)
    weight = torch.randn(shape) * torch.logspace(-2, 2, shape[0])[:, None]
    values, scales = quantised(weight, block)
    other = torch.randn(5)
    write(tmp_path, {"a.weight": values, "a.weight_scale_inv": scales, "n": other}, block=[16, 32])
    got = load(tmp_path, dtype)
    assert got.keys() == {"a.weight", "n"}
    assert torch.equal(got["a.weight"], dequantised(values, scales, block).to(dtype))
    assert torch.equal(got["n"], other.to(dtype))


def test_factors_may_be_in_another_file(tmp_path: Path) -> None:
    values, scales = quantised(torch.randn(20, 20), (8, 8))
    write(tmp_path, {"a.weight": values}, {"a.weight_scale_inv": scales}, block=[8, 8])
    assert torch.equal(load(tmp_path)["a.weight"], dequantised(values, scales, (8, 8)))
    (tmp_path / "model-1.safetensors").rename(tmp_path / "model-.safetensors")
    assert torch.equal(load(tmp_path)["a.weight"], dequantised(values, scales, (8, 8)))


def test_stacked_matrices(tmp_path: Path) -> None:
    parts = [quantised(torch.randn(20, 12), (8, 8)) for _ in range(3)]
    values = torch.stack([v.view(torch.uint8) for v, _ in parts]).view(E4M3)
    scales = torch.stack([s for _, s in parts])
    write(tmp_path, {"e": values, "e_scale_inv": scales}, block=[8, 8])
    want = torch.stack([dequantised(v, s, (8, 8)) for v, s in parts])
    assert torch.equal(load(tmp_path)["e"], want)


@pytest.mark.parametrize("shape", [(), (1,), (6,), (6, 1)])
def test_a_factor_for_all_or_for_each_row(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = torch.randn(6, 10).to(E4M3)
    scales = torch.rand(shape) + 0.5
    extra = {"a.input_scale": torch.tensor(3.0)}
    write(tmp_path, {"a.weight": values, "a.weight_scale": scales, **extra})
    want = values.float() * (scales if scales.numel() == 1 else scales.view(6, 1))
    got = load(tmp_path)
    assert got.keys() == {"a.weight"}
    assert torch.equal(got["a.weight"], want)


def test_factors_that_are_powers_of_two(tmp_path: Path) -> None:
    values = torch.randn(16, 16).to(torch.float8_e5m2)
    scales = torch.tensor([[0.5, 4.0], [2.0**-20, 1.0]]).to(torch.float8_e8m0fnu)
    write(tmp_path, {"a.weight": values, "a.weight_scale_inv": scales}, block=[8, 8])
    want = dequantised(values, scales.float(), (8, 8))
    assert torch.equal(load(tmp_path)["a.weight"], want)


@pytest.mark.parametrize(
    ("scales", "block", "message"),
    [
        (torch.ones(3, 2), [8, 8], r"'a\.weight' have shape \[3, 2\]; they must have \[2, 2\]"),
        (torch.ones(2), [8, 8], r"shape \[2\]; they must have \[2, 2\]"),
        (torch.ones(4), None, r"shape \[4\]; they must have \[1, 1\]"),
    ],
)
def test_factors_that_do_not_fit(
    tmp_path: Path, scales: torch.Tensor, block: Any, message: str
) -> None:
    tensors = {"a.weight": torch.zeros(16, 16).to(E4M3), "a.weight_scale_inv": scales}
    with pytest.raises(CheckpointError, match=message):
        load(write(tmp_path, tensors, block=block))


def test_missing_and_left_over_factors_are_named(tmp_path: Path) -> None:
    values = torch.zeros(4, 4).to(E4M3)
    with pytest.raises(CheckpointError, match=r"'a\.weight' but not.*'a\.weight_scale_inv'"):
        load(write(tmp_path, {"a.weight": values}, block=[4, 4]))
    tensors = {"a.weight": torch.zeros(4, 4), "a.weight_scale_inv": torch.ones(1, 1)}
    with pytest.raises(CheckpointError, match=r"factors 'a\.weight_scale_inv', but no 8-bit"):
        load(write(tmp_path, tensors, block=[4, 4]))


@pytest.mark.parametrize("block", [[128], "128", [0, 128], [1.5, 2]])
def test_a_block_size_that_makes_no_sense(tmp_path: Path, block: Any) -> None:
    write(tmp_path, {"a.weight": torch.zeros(4, 4).to(E4M3)}, block=block)
    with pytest.raises(UnsupportedModelError, match="weight_block_size"):
        load(tmp_path)


class TestDeepseekV3:
    """The whole of a checkpoint as DeepSeek publishes them, on its way to logits."""

    BLOCK = (32, 16)

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        reference_model("deepseek v3").save_pretrained(tmp_path)
        path = tmp_path / "model.safetensors"
        plain = load_file(path)
        path.unlink()
        tensors: Weights = {}
        for name, tensor in plain.items():
            if "_proj" in name:
                tensors[name], tensors[f"{name}_scale_inv"] = quantised(tensor, self.BLOCK)
            else:
                tensors[name] = tensor
        # The layer after the last predicts a further token.
        extra = {"eh_proj.weight": torch.zeros(8, 16), "embed_tokens.weight": torch.zeros(4, 8)}
        tensors |= {f"model.layers.4.{name}": tensor for name, tensor in extra.items()}
        config = json.loads((tmp_path / "config.json").read_text())
        write(tmp_path, tensors, block=list(self.BLOCK), config=config)
        return tmp_path

    def test_logits(self, folder: Path) -> None:
        checkpoint = open_checkpoint(str(folder))
        model = load_model(make_config(checkpoint.hf_config), checkpoint, torch.device("cpu"))
        reference = reference_model("deepseek v3")
        stored = load_file(folder / "model-0.safetensors")
        with torch.no_grad():
            expanded = {
                name: dequantised(tensor, stored[f"{name}_scale_inv"], self.BLOCK)
                for name, tensor in stored.items()
                if tensor.dtype == E4M3
            }
            _fill(reference, expanded)
            tokens = torch.arange(3, 60)[None]
            want = reference(tokens).logits[0]
            unrounded = reference_model("deepseek v3")(tokens).logits[0]
        got = PagedRunner(model).step({0: tokens[0].tolist()})[0]
        assert (got - want).abs().max() < 1e-4
        assert (got - unrounded).abs().max() > 1e-2

    def test_what_routers_compare_is_not_rounded(self, folder: Path) -> None:
        bias = dict(load_weights(open_checkpoint(str(folder)), torch.bfloat16))[
            "model.layers.1.mlp.gate.e_score_correction_bias"
        ]
        own = reference_model("deepseek v3").model.layers[1].mlp.gate.e_score_correction_bias
        assert torch.equal(bias, own)


def _fill(reference: Any, weights: Weights) -> None:
    """Put a checkpoint's matrices into a transformers model, which stacks those of experts."""
    state = reference.state_dict()
    for name, tensor in weights.items():
        if ".experts." not in name:
            state[name].copy_(tensor)
            continue
        stem, _, rest = name.partition(".experts.")
        expert, part, _ = rest.split(".")
        if part == "down_proj":
            state[f"{stem}.experts.down_proj"][int(expert)] = tensor
        else:
            stacked = state[f"{stem}.experts.gate_up_proj"][int(expert)]
            half = stacked.shape[0] // 2
            (stacked[:half] if part == "gate_proj" else stacked[half:]).copy_(tensor)
