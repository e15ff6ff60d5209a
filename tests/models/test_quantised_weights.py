"""Quantised safetensors folders load as the values that their integers stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from jubako import LLM, SamplingParams
from jubako.checkpoint.info import open_checkpoint
from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.models.loader import load_weights, packed_weights
from tests.exactness.oracle import Oracle, make_prompts, write_tokenizer
from tests.exactness.sizes import SMALL, VOCAB
from tests.models import packings
from tests.models.packings import Packing

Weights = dict[str, torch.Tensor]


def compressed(
    format: str, *, groups: dict[str, Any] | None = None, **scheme: Any
) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True} | scheme
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": groups or {"group_0": group},
        "ignore": ["lm_head"],
    }


def gptq(**entries: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False} | entries


def awq(**entries: Any) -> dict[str, Any]:
    common = {"bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
    return {"quant_method": "awq"} | common | entries


GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 16}
ASYMMETRIC = {**GROUPS, "symmetric": False}

FORMATS: dict[str, tuple[dict[str, Any], Packing]] = {
    "int8, rows": (compressed("int-quantized"), packings.int8()),
    "int8, groups, zero points": (
        compressed("int-quantized", strategy="group", group_size=32, symmetric=False),
        packings.int8(32, symmetric=False),
    ),
    "int8, one scale": (compressed("int-quantized", strategy="tensor"), packings.int8_for_all),
    "int8, older name": (compressed("naive-quantized"), packings.int8()),
    "packed int4": (compressed("pack-quantized", **GROUPS), packings.pack_quantized(4, 16)),
    "packed int4, rows": (
        compressed("pack-quantized", num_bits=4),
        packings.pack_quantized(4, None),
    ),
    "packed int4, zero points": (
        compressed("pack-quantized", **ASYMMETRIC),
        packings.pack_quantized(4, 16, symmetric=False),
    ),
    "packed int4, plain zero points": (
        compressed("pack-quantized", **ASYMMETRIC),
        packings.pack_quantized(4, 16, symmetric=False, packed_zeros=False),
    ),
    "packed int4, columns in another order": (
        compressed("pack-quantized", **ASYMMETRIC, actorder="group"),
        packings.pack_quantized(4, 16, symmetric=False, shuffled=True),
    ),
    "packed int8": (
        compressed("pack-quantized", strategy="group", group_size=32),
        packings.pack_quantized(8, 32),
    ),
    "awq": (awq(), packings.awq(16)),
    "awq, older names": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"},
        packings.awq(32),
    ),
    "awq, rows": (awq(group_size=-1), packings.awq(None)),
    "gptq": (gptq(), packings.gptq(4, 16)),
    "gptq, symmetric": (gptq(sym=True), packings.gptq(4, 16, symmetric=True)),
    "gptq, no index": (gptq(), packings.gptq(4, 16, with_index=False)),
    "gptq, columns in another order": (
        gptq(desc_act=True),
        packings.gptq(4, 16, shuffled=True),
    ),
    "gptq, second version": (
        gptq(checkpoint_format="gptq_v2"),
        packings.gptq(4, 16, v2=True),
    ),
    "gptq, 8 bits": (gptq(bits=8, group_size=32), packings.gptq(8, 32)),
    "gptq, 8 bits, rows": (gptq(bits=8, group_size=-1), packings.gptq(8, None)),
    "fp8, rows": (
        compressed("float-quantized", type="float", strategy="channel"),
        packings.fp8(rows=True),
    ),
    "fp8, one scale": (
        compressed("float-quantized", type="float", strategy="tensor"),
        packings.fp8(rows=False),
    ),
    "fp8, older name": (
        compressed("naive-quantized", type="float", strategy="tensor"),
        packings.fp8(rows=False),
    ),
    "fp8, blocks": (
        compressed("float-quantized", type="float", strategy="block", block_structure=[32, 16]),
        packings.fp8_blocks((32, 16)),
    ),
    "fbgemm fp8": ({"quant_method": "fbgemm_fp8"}, packings.fp8(rows=True)),
    "fp8 method, one scale": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        packings.fp8(rows=False),
    ),
}


def write(
    folder: Path, tensors: Weights, quantisation: dict[str, Any], **config: Any
) -> dict[str, Any]:
    save_file(tensors, folder / "model.safetensors")
    entries = {**config, "quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(entries))
    return entries


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return dict(load_weights(open_checkpoint(str(folder)), dtype))


def random_matrix(n: int, m: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(n + m)
    spread = np.logspace(-1, 1, n)[:, None]
    return ((rng.standard_normal((n, m)) + 0.4) * spread).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(packed_weights, "CHUNK_ELEMENTS", 200)  # several pieces, the last short
    quantisation, pack = FORMATS[name]
    stored, values = pack(random_matrix(40, 96))
    tensors = {f"a{ending}": tensor for ending, tensor in stored.items()}
    tensors |= {"a.input_scale": torch.ones(1), "a.k_scale": torch.ones(1), "n": torch.randn(5)}
    write(tmp_path, tensors, quantisation)
    got = load(tmp_path, dtype)
    assert got.keys() == {"a.weight", "n"}
    assert got["a.weight"].is_contiguous()
    assert torch.equal(got["a.weight"], torch.from_numpy(values).to(dtype))
    assert torch.equal(got["n"], tensors["n"].to(dtype))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_of_0_less_1(tmp_path: Path, bits: int) -> None:
    weight = random_matrix(24, 64)
    weight[::3] = abs(weight[::3])
    stored, values = packings.gptq(bits, 16)(weight)
    tensors = {f"a{ending}": tensor for ending, tensor in stored.items()}
    write(tmp_path, tensors, gptq(bits=bits))
    assert torch.equal(load(tmp_path)["a.weight"], torch.from_numpy(values))


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_rows_need_not_fill_words(tmp_path: Path, bits: int) -> None:
    pack = packings.pack_quantized(bits, None, symmetric=False)
    stored, values = pack(random_matrix(5, 13))
    tensors = {f"a{ending}": tensor for ending, tensor in stored.items()}
    write(tmp_path, tensors, compressed("pack-quantized", num_bits=bits, symmetric=False))
    assert torch.equal(load(tmp_path)["a.weight"], torch.from_numpy(values))


def test_layers_may_have_different_numbers_of_bits(tmp_path: Path) -> None:
    schemes = [{"num_bits": 4, "group_size": 16}, {"num_bits": 8, "group_size": 32}]
    groups = {str(i): {"weights": {"type": "int", **s}} for i, s in enumerate(schemes)}
    tensors, want = {}, {}
    for name, bits, size in (("a", 4, 16), ("b", 8, 32)):
        stored, want[name] = packings.pack_quantized(bits, size)(random_matrix(24, 64))
        tensors |= {f"{name}{ending}": tensor for ending, tensor in stored.items()}
    write(tmp_path, tensors, compressed("pack-quantized", groups=groups))
    got = load(tmp_path)
    for name, values in want.items():
        assert torch.equal(got[f"{name}.weight"], torch.from_numpy(values))


@pytest.mark.parametrize("name", [n for n in FORMATS if "method" not in n and "older" not in n])
def test_through_the_engine(tmp_path: Path, name: str) -> None:
    quantisation, pack = FORMATS[name]
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SMALL, num_hidden_layers=2, tie_word_embeddings=False)
    reference = transformers.LlamaForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    plain = load_file(tmp_path / "model.safetensors")
    tensors: Weights = {}
    moved = 0.0
    for path, tensor in plain.items():
        if "_proj" not in path:
            tensors[path] = tensor
            continue
        stored, values = pack(tensor.numpy())
        tensors |= {path.removesuffix(".weight") + end: part for end, part in stored.items()}
        if quantisation["quant_method"] == "gptq":  # as its tools write for every layer
            tensors[path.removesuffix("weight") + "bias"] = torch.zeros(len(tensor))
        moved = max(moved, float((torch.from_numpy(values) - tensor).abs().max()))
        reference.state_dict()[path].copy_(torch.from_numpy(values))
    entries = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path, tensors, quantisation, **entries)
    assert moved > 1e-4, "the matrices are not what they were before"
    llm = LLM(
        model=str(tmp_path),
        dtype="float32",
        max_model_len=256,
        kv_cache_memory_bytes=1 << 24,
        num_threads=1,
    )
    try:
        oracle = Oracle(reference)
        prompts = make_prompts([3, 20, 41], VOCAB, seed=1)
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        for prompt, output in zip(prompts, llm.generate(inputs, params, use_tqdm=False)):
            oracle.judge(prompt, output.outputs[0].token_ids)
    finally:
        llm.shutdown()


def stored_as(name: str) -> tuple[Weights, dict[str, Any]]:
    quantisation, pack = FORMATS[name]
    stored, _ = pack(random_matrix(16, 32))
    return {f"a.q_proj{ending}": tensor for ending, tensor in stored.items()}, quantisation


NEEDED = [
    ("int8, rows", ".weight_scale"),
    ("int8, groups, zero points", ".weight_zero_point"),
    ("packed int4", ".weight_scale"),
    ("packed int4", ".weight_shape"),
    ("packed int4, zero points", ".weight_zero_point"),
    ("packed int4, columns in another order", ".weight_g_idx"),
    ("awq", ".qzeros"),
    ("awq", ".scales"),
    ("gptq", ".qzeros"),
    ("gptq", ".scales"),
    ("gptq, columns in another order", ".g_idx"),
    ("fp8, rows", ".weight_scale"),
]


@pytest.mark.parametrize(("name", "ending"), NEEDED)
def test_a_missing_part_is_named(tmp_path: Path, name: str, ending: str) -> None:
    tensors, quantisation = stored_as(name)
    del tensors[f"a.q_proj{ending}"]
    write(tmp_path, tensors, quantisation)
    with pytest.raises(CheckpointError, match=rf"'a\.q_proj\.\w+' but not .*'a\.q_proj\{ending}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "main"),
    [("packed int4", ".weight_packed"), ("awq", ".qweight"), ("gptq", ".qweight")],
)
def test_a_part_without_its_weight_is_named(tmp_path: Path, name: str, main: str) -> None:
    tensors, quantisation = stored_as(name)
    del tensors[f"a.q_proj{main}"]
    write(tmp_path, tensors, quantisation)
    with pytest.raises(CheckpointError, match=rf"no quantised tensor 'a\.q_proj\{main}'"):
        load(tmp_path)


@pytest.mark.parametrize(("name", "ending"), NEEDED)
def test_a_part_that_does_not_fit_is_named(tmp_path: Path, name: str, ending: str) -> None:
    tensors, quantisation = stored_as(name)
    part = tensors[f"a.q_proj{ending}"]
    tensors[f"a.q_proj{ending}"] = torch.cat((part, part[:1], part[:1]))
    write(tmp_path, tensors, quantisation)
    with pytest.raises(CheckpointError, match=r"'a\.q_proj\.weight|'a\.q_proj\.\w+' has shape"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("gptq, columns in another order", ".g_idx"),
        ("packed int4, columns in another order", ".weight_g_idx"),
    ],
)
def test_a_group_that_does_not_exist(tmp_path: Path, name: str, ending: str) -> None:
    tensors, quantisation = stored_as(name)
    tensors[f"a.q_proj{ending}"][3] = 2
    write(tmp_path, tensors, quantisation)
    with pytest.raises(CheckpointError, match=rf"\{ending}' has groups 0 to 2, but there are 2"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "main"), [("packed int4", ".weight_packed"), ("gptq", ".qweight")]
)
def test_a_weight_of_another_dtype(tmp_path: Path, name: str, main: str) -> None:
    tensors, quantisation = stored_as(name)
    tensors[f"a.q_proj{main}"] = tensors[f"a.q_proj{main}"].long()
    write(tmp_path, tensors, quantisation)
    with pytest.raises(CheckpointError, match=rf"\{main}' has dtype I64; it must be I32"):
        load(tmp_path)


@pytest.mark.parametrize("shape", [[16, 40], [8, 32], [0, 0], [16, -1]])
def test_a_shape_that_does_not_fit(tmp_path: Path, shape: list[int]) -> None:
    tensors, quantisation = stored_as("packed int4")
    tensors["a.q_proj.weight_shape"] = torch.tensor(shape)
    write(tmp_path, tensors, quantisation)
    with pytest.raises(CheckpointError, match=r"'a\.q_proj\.weight_(packed|shape)' has"):
        load(tmp_path)


def test_integers_that_are_no_weight(tmp_path: Path) -> None:
    write(tmp_path, {"mask": torch.zeros(3, dtype=torch.int32)}, gptq())
    with pytest.raises(CheckpointError, match="integers 'mask'"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'.*awq, compressed-tensors, .*gptq"),
        ({"bits": 4}, "quantised with None"),
        (gptq(bits=3), "bits 3; supported: 4, 8"),
        (gptq(checkpoint_format="marlin"), "checkpoint_format 'marlin'; supported: gptq, gptq_v2"),
        (gptq(is_marlin_format=True), "is_marlin_format"),
        (gptq(group_size=0), "group_size"),
        (awq(bits=8), "bits 8; supported: 4"),
        (awq(version="gemv"), "version 'gemv'; supported: gemm"),
        (awq(zero_point=False), "zero_point False"),
        (compressed("nvfp4-pack-quantized"), "'nvfp4-pack-quantized'; supported: int-quantized"),
        (compressed("pack-quantized", num_bits=3), "num_bits of weights 3; supported: 4, 8"),
        (compressed("int-quantized", type="float"), "type of weights 'float'; supported: int"),
        (compressed("int-quantized", strategy="block"), "strategy of weights 'block'"),
        (compressed("int-quantized", groups={"g": {"weights": None}}), "config_groups"),
        (compressed("int-quantized", group_size="many", strategy="group"), "group_size"),
        (
            compressed("int-quantized", groups={"g": {"weights": {}}, "h": 3}),
            "config_groups in config.json must be objects, got 3",
        ),
        (compressed("int-quantized") | {"transform_config": {"R1": {}}}, "transform_config"),
        (compressed("int-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "24"),
        (
            compressed("float-quantized", type="float", strategy="block", block_structure=None),
            "block_structure",
        ),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, quantisation: dict[str, Any], message: str
) -> None:
    write(tmp_path, {"a.weight": torch.zeros(2, 2)}, quantisation)
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(str(tmp_path))
