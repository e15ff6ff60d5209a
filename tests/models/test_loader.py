"""Loading weights: every ggml type, both formats with the same tensors, and damaged files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as QuantType
from safetensors.torch import save_file

from jubako.checkpoint.info import Checkpoint, open_checkpoint
from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.models.load import load_model
from jubako.models.loader import gguf_weights, load_weights
from jubako.models.loader.dequantize import BLOCKS, dequantize
from jubako.models.loader.safetensors_weights import safetensors_weights
from tests.checkpoint.gguf_files import ARCHITECTURES, tiny_model, write_model
from tests.checkpoint.test_gguf_config import minimal
from tests.models.harness import PagedRunner, make_config


def load(
    checkpoint: Checkpoint | Path, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    if isinstance(checkpoint, Path):
        checkpoint = open_checkpoint(str(checkpoint))
    weights = list(load_weights(checkpoint, dtype, "cpu"))
    names = [name for name, _ in weights]
    assert len(set(names)) == len(names)
    assert all(weight.is_contiguous() for _, weight in weights)
    # What is small may stay as precise as it was stored.
    assert {weight.dtype for _, weight in weights} <= {dtype, torch.float32}
    return dict(weights)


# -- ggml's types -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_values_are_those_of_the_gguf_package(name: str) -> None:
    _, nbytes = BLOCKS[name]
    blocks = np.random.default_rng(0).integers(0, 256, (300, nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, QuantType[name])
    ours = dequantize(torch.from_numpy(blocks), name).float().numpy()
    # Random bits make some scales infinite or no number; those are compared as well.
    assert np.array_equal(ours, expected.reshape(ours.shape), equal_nan=True)


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_a_block_alone_is_read_as_among_others(name: str) -> None:
    blocks = torch.randint(0, 120, (4, BLOCKS[name][1]), dtype=torch.uint8)
    alone = [dequantize(blocks[i : i + 1], name) for i in range(4)]
    assert torch.equal(torch.cat(alone), dequantize(blocks, name))


def test_types_that_are_promised() -> None:
    promised = "F32 F16 BF16 Q8_0 Q5_0 Q5_1 Q4_0 Q4_1 Q4_K Q5_K Q6_K Q2_K Q3_K"
    assert set(promised.split()) <= BLOCKS.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_of_several_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(gguf_weights, "CHUNK_ELEMENTS", 256)
    data = np.random.default_rng(0).standard_normal((30, 32)).astype(np.float32)
    blocks = gguf.quants.quantize(data, QuantType.Q5_0)

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("output.weight", blocks, raw_dtype=QuantType.Q5_0)

    minimal(tmp_path / "m.gguf", more=more)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, QuantType.Q5_0)).to(dtype)
    assert torch.equal(load(tmp_path, dtype)["lm_head.weight"], expected)


def test_unsupported_type_is_named_before_anything_is_read(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        blocks = np.zeros((4, 2 * 18), np.uint8)
        writer.add_tensor("output.weight", blocks, raw_dtype=QuantType.IQ4_NL)

    minimal(tmp_path / "m.gguf", more=more)
    weights = load_weights(open_checkpoint(str(tmp_path)), torch.float32, "cpu")
    with pytest.raises(UnsupportedModelError, match=r"'output\.weight' has type IQ4_NL; .*Q4_K"):
        next(weights)


@pytest.mark.parametrize("name", ["blk.0.attn_sinks.weight", "mystery", "blk.x.attn_q.weight"])
def test_unknown_tensor_name(tmp_path: Path, name: str) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor(name, np.zeros(4, np.float32))

    minimal(tmp_path / "m.gguf", more=more)
    with pytest.raises(CheckpointError, match=f"'{name}' is unknown in GGUF architecture 'llama'"):
        load(tmp_path)


# -- both formats -----------------------------------------------------------------------------


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", [QuantType.F32, QuantType.BF16])
def test_same_tensors_from_both_formats(tmp_path: Path, architecture: str, kind: QuantType) -> None:
    model = tiny_model(architecture)
    folder = load(save(model, tmp_path / "hf"))
    path = tmp_path / "m.gguf"
    write_model(path, model, architecture, quantise=lambda name: kind)
    file = load(path)
    assert file.keys() == folder.keys()
    for name, weight in folder.items():
        if architecture == "gemma3" and name.endswith("norm.weight"):
            # 1 + w is rounded to float32 in the file.
            torch.testing.assert_close(file[name], weight, rtol=0, atol=2e-7)
        else:
            assert torch.equal(file[name], weight), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_answers_as_the_original(tmp_path: Path, architecture: str) -> None:
    model = tiny_model(architecture)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.4)  # else softmaxes have one value, and rounding decides which
    write_model(tmp_path / "m.gguf", model, architecture)
    checkpoint = open_checkpoint(str(tmp_path))
    ours = load_model(make_config(checkpoint.hf_config), checkpoint, torch.device("cpu"))
    tokens = torch.randint(3, 96, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(tokens[None]).logits[0]
    got = PagedRunner(ours).step({0: tokens.tolist()})[0]
    assert (got - want).abs().max() < 1e-4 * want.abs().max().clamp(min=1)


def test_gemma_norms_are_bit_equal_in_bfloat16(tmp_path: Path) -> None:
    model = tiny_model("gemma3", dtype="bfloat16")
    expected = load(save(model, tmp_path / "hf"), torch.bfloat16)
    got = load(write_model(tmp_path / "m.gguf", model, "gemma3"), torch.bfloat16)
    assert expected.keys() == got.keys()
    assert all(torch.equal(got[name], weight) for name, weight in expected.items())


def test_quantised_llama_rows_are_unpermuted(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = load(save(model, tmp_path / "hf"))
    file = load(
        write_model(tmp_path / "m.gguf", model, "llama", quantise=lambda name: QuantType.Q8_0)
    )
    for name, weight in folder.items():
        torch.testing.assert_close(file[name], weight, rtol=0, atol=0.02)


def test_llama_biases_are_unpermuted(tmp_path: Path) -> None:
    model = tiny_model("llama", attention_bias=True)
    folder = load(save(model, tmp_path / "hf"))
    file = load(write_model(tmp_path / "m.gguf", model, "llama"))
    assert any(name.endswith("q_proj.bias") for name in file)
    assert all(torch.equal(file[name], weight) for name, weight in folder.items())


def test_shards_and_conversion(tmp_path: Path) -> None:
    model = tiny_model("qwen3", dtype="float16")
    save(model, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    got = load(tmp_path, torch.float32)
    expected = model.state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name].float()) for name in expected)


def test_caller_may_keep_what_it_gets(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4), "b": torch.zeros(4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    weights = load(tmp_path)
    weights["a"].fill_(7)
    assert weights["b"].tolist() == [0, 0, 0, 0]
    assert load(tmp_path)["a"].tolist() == [1, 1, 1, 1]


def test_scalar_and_empty_tensors(tmp_path: Path) -> None:
    tensors = {"s": torch.tensor(3.0), "e": torch.zeros(0, 4), "d": torch.ones(2).double()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    got = load(tmp_path, torch.bfloat16)
    assert {name: tuple(t.shape) for name, t in got.items()} == {"s": (), "e": (0, 4), "d": (2,)}
    assert got["s"].item() == 3.0


# -- damaged safetensors ----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(2, 3), "b": torch.zeros(5)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def with_header(folder: Path, header: Any, data: bytes = bytes(64)) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def info(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}}


@pytest.mark.parametrize("keep", [0, 5, 8, 20])
def test_header_cut_short(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no safetensors file or is"):
        load(folder)


def test_data_cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"cut short: tensor '[ab]' would end at byte"):
        load(folder)


def test_absurd_header_length(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**63) + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="its header would be 9223372036854775808 bytes"):
        load(folder)


@pytest.mark.parametrize("header", [b"{", b"\xff\xfe", b"[]"])
def test_header_that_is_no_object(folder: Path, header: bytes) -> None:
    with_header(folder, header)
    with pytest.raises(CheckpointError, match=r"header of model\.safetensors is damaged"):
        load(folder)


@pytest.mark.parametrize(
    "header",
    [
        {"a": 3},
        {"a": {}},
        info(shape="x"),
        info(shape=[-2, -3]),
        info(shape=[2.5]),
        info(data_offsets=[0]),
        info(data_offsets=[24, 0]),
        info(data_offsets=[0, 20]),
        info(shape=[2**40, 2**40]),
    ],
)
def test_entry_that_makes_no_sense(folder: Path, header: Any) -> None:
    with_header(folder, header)
    with pytest.raises(CheckpointError, match=r"header of model\.safetensors is damaged"):
        load(folder)


def test_what_models_keep_in_float32_is_not_rounded_on_the_way(tmp_path: Path) -> None:
    """A norm, a bias and the rates of a recurrence; matrices are as wanted."""
    torch.manual_seed(0)
    stored = {
        "norm.weight": torch.randn(5),
        "mixer.A_log": torch.randn(3, 4),
        "mixer.weight": torch.randn(3, 4),
        "half.weight": torch.randn(5).half(),
    }
    save_file(stored, tmp_path / "model.safetensors")
    files = [tmp_path / "model.safetensors"]
    found = dict(safetensors_weights(files, torch.bfloat16, torch.device("cpu")))
    for name in ("norm.weight", "mixer.A_log"):
        assert torch.equal(found[name], stored[name])
        assert found[name].dtype == torch.float32
    for name in ("mixer.weight", "half.weight"):
        assert torch.equal(found[name], stored[name].bfloat16())


@pytest.mark.parametrize("kind", ["I64", "U8", "F8_E4M3", "BOOL", None])
def test_unexpected_dtype_is_named(folder: Path, kind: Any) -> None:
    with_header(folder, info(dtype=kind))
    with pytest.raises(CheckpointError, match=f"Tensor 'a'.* has dtype {kind}; .*F64, F32"):
        load(folder)


def test_tensor_in_two_files(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "x.safetensors")
    save_file({"a": torch.ones(1)}, folder / "y.safetensors")
    with pytest.raises(CheckpointError, match="'a' is in two weight files"):
        load(folder)


def test_rows_that_do_not_fit_the_heads(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_q.weight", np.zeros((6, 32), np.float32))

    minimal(tmp_path / "m.gguf", more=more)
    with pytest.raises(CheckpointError, match="6 rows, which do not fit 2 heads"):
        load(tmp_path)


def test_file_description_is_closed_when_abandoned(folder: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    weights = load_weights(open_checkpoint(str(folder)), torch.float32, "cpu")
    next(weights)
    weights.close()  # type: ignore[attr-defined]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_folder_in_the_place_of_a_weight_file(tmp_path: Path) -> None:
    """Opening one works; only reading does not."""
    with pytest.raises(CheckpointError, match="cannot be read"):
        list(safetensors_weights([tmp_path], torch.float32, torch.device("cpu")))


def test_a_gguf_tensor_without_elements(tmp_path: Path) -> None:
    def more(writer: Any) -> None:
        writer.add_tensor("empty", np.zeros((0, 32), np.float32))

    with pytest.raises(CheckpointError, match="'empty' without elements"):
        minimal(tmp_path / "m.gguf", more=more)
