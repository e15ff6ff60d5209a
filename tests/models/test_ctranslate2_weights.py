"""CTranslate2 files load as the Whisper they were made from, whatever they are stored in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from jubako.checkpoint.info import open_checkpoint
from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.models.loader import ctranslate2_weights as reader
from jubako.models.loader import load_weights
from tests.checkpoint.ctranslate2_files import model_file, whisper_variables, write_folder

HEADS = 2


@pytest.fixture(scope="module")
def state() -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=60, num_mel_bins=8, d_model=16, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=24,
        decoder_ffn_dim=40, max_source_positions=10, max_target_positions=12, init_std=0.3,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    for name, tensor in model.state_dict().items():
        if name.endswith("bias") or "norm" in name:
            tensor.copy_(torch.randn_like(tensor))
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return dict(load_weights(open_checkpoint(str(folder)), dtype))


def wanted(state: dict[str, np.ndarray]) -> set[str]:
    return set(state) - {"proj_out.weight"}


@pytest.mark.parametrize(("dtype", "error"), [("float32", 0.0), ("float16", 1e-3)])
def test_plain_weights(
    tmp_path: Path, state: dict[str, np.ndarray], dtype: str, error: float
) -> None:
    data = model_file(whisper_variables(state, HEADS, dtype))
    weights = loaded(write_folder(tmp_path / "m", data))
    assert set(weights) == wanted(state)
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float32
        assert tensor.shape == state[name].shape
        assert np.abs(tensor.numpy() - state[name]).max() <= error * np.abs(state[name]).max()


@pytest.mark.parametrize(("dtype", "steps"), [("int8", 127), ("int16", 32767)])
def test_quantised_weights_are_within_half_a_step(
    tmp_path: Path, state: dict[str, np.ndarray], dtype: str, steps: int
) -> None:
    weights = loaded(
        write_folder(tmp_path / "m", model_file(whisper_variables(state, HEADS, dtype)))
    )
    assert set(weights) == wanted(state)
    largest = max(np.abs(tensor).max() for tensor in state.values())
    for name, tensor in weights.items():
        # Fused matrices share the one scale of int16.
        step = (np.abs(state[name]).max() if dtype == "int8" else largest) / steps
        assert np.abs(tensor.numpy() - state[name]).max() <= 0.5001 * step


def test_small_pieces_give_the_same(
    tmp_path: Path, state: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "m", model_file(whisper_variables(state, HEADS, "int8")))
    whole = loaded(folder)
    monkeypatch.setattr(reader, "CHUNK_BYTES", 50)
    for name, tensor in loaded(folder).items():
        assert torch.equal(tensor, whole[name])


def test_equal_variables_are_stored_once(tmp_path: Path, state: dict[str, np.ndarray]) -> None:
    variables = whisper_variables(state, HEADS)
    ones = variables.pop("decoder/layer_1/ffn/layer_norm/gamma")
    variables["encoder/layer_norm/gamma"] = ones
    aliases = {
        "decoder/layer_1/ffn/layer_norm/gamma": "encoder/layer_norm/gamma",
        "decoder/projection/weight": "decoder/embeddings/weight",
    }
    weights = loaded(write_folder(tmp_path / "m", model_file(variables, aliases)))
    assert set(weights) == wanted(state)
    assert (weights["model.decoder.layers.1.final_layer_norm.weight"].numpy() == ones).all()


def test_an_output_matrix_of_its_own_is_given(tmp_path: Path, state: dict[str, np.ndarray]) -> None:
    variables = whisper_variables(state, HEADS)
    variables["decoder/projection/weight"] = variables["decoder/embeddings/weight"] + 1
    weights = loaded(write_folder(tmp_path / "m", model_file(variables)))
    assert torch.equal(weights["proj_out.weight"], weights["model.decoder.embed_tokens.weight"] + 1)


MATRIX = "decoder/layer_0/ffn/linear_0/weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({MATRIX + "_scale": None}, "has no scales"),
        ({MATRIX + "_scale": np.zeros(40, np.float32)}, "not above 0"),
        ({MATRIX + "_scale": np.full(40, np.nan, np.float32)}, "not above 0"),
        ({MATRIX + "_scale": np.ones(39, np.float32)}, "39 scales"),
        ({"encoder/layer_0/what/weight": np.zeros(3, np.float32)}, "unknown"),
        ({"encoder/layer_0/self_attention/linear_0/bias": np.ones(48, np.float32)}, "bias of keys"),
        ({"encoder/layer_0/self_attention/linear_0/bias": np.zeros(47, np.float32)}, "3 equal"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, state: dict[str, np.ndarray], change: dict[str, object], told: str
) -> None:
    variables = whisper_variables(state, HEADS, "int8") | change
    kept = {name: value for name, value in variables.items() if value is not None}
    with pytest.raises(CheckpointError, match=told):
        loaded(write_folder(tmp_path / "m", model_file(kept)))


def test_four_bits_are_refused_before_anything_is_read(
    tmp_path: Path, state: dict[str, np.ndarray]
) -> None:
    variables = whisper_variables(state, HEADS)
    variables[MATRIX] = np.zeros((40, 2), np.int32)
    folder = write_folder(tmp_path / "m", model_file(variables))
    with pytest.raises(UnsupportedModelError, match="type int32"):
        next(load_weights(open_checkpoint(str(folder)), torch.float32))
