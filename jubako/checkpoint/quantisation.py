"""Which quantised safetensors folders can be read, and how are their weights stored?

By `quantization_config` in config.json: `quant_method` names the tool's format, and
compressed-tensors has several. Everything that its entries can say and that would change what the
stored numbers mean is either understood or refused here, before a weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jubako.errors import UnsupportedModelError

COMPRESSED = "compressed-tensors"
INT_QUANTIZED, PACK_QUANTIZED = "int-quantized", "pack-quantized"
FLOAT_QUANTIZED, NAIVE_QUANTIZED = "float-quantized", "naive-quantized"
METHODS = ("awq", COMPRESSED, "fbgemm_fp8", "fp8", "gptq", "mxfp4")
"""Known values of `quant_method`."""

_TYPES = {
    INT_QUANTIZED: ("int", (8,), ("tensor", "channel", "group")),
    PACK_QUANTIZED: ("int", (4, 8), ("tensor", "channel", "group")),
    FLOAT_QUANTIZED: ("float", (8,), ("tensor", "channel", "block")),
}
"""By format of compressed-tensors: type, numbers of bits and strategies of the weights."""


def weight_format(config: Mapping[str, Any]) -> str | None:
    """How the weights of a folder with this config.json are stored; None if they are plain.

    One of `METHODS`, or for compressed-tensors the name of its format. Raises UnsupportedModelError
    for a method, a format or an entry that is not known.
    """
    quantisation = config.get("quantization_config")
    if not isinstance(quantisation, Mapping):
        return None
    method = quantisation.get("quant_method")
    if method not in METHODS:
        raise UnsupportedModelError(
            f"The model is quantised with {method!r}; of safetensors folders {', '.join(METHODS)} "
            "and weights that are not quantised can be read. Use a GGUF file for others."
        )
    if method == COMPRESSED:
        return _compressed_format(quantisation)
    if method == "awq":
        _check(quantisation, "bits", quantisation.get("bits", quantisation.get("w_bit", 4)), (4,))
        _check(quantisation, "version", str(quantisation.get("version", "gemm")).lower(), ("gemm",))
        _check(quantisation, "zero_point", quantisation.get("zero_point", True), (True,))
        group_size(quantisation, "q_group_size")
    if method == "gptq":
        _check(quantisation, "bits", quantisation.get("bits"), (4, 8))
        kind = quantisation.get("checkpoint_format") or "gptq"
        _check(quantisation, "checkpoint_format", kind, ("gptq", "gptq_v2"))
        _check(
            quantisation, "is_marlin_format", bool(quantisation.get("is_marlin_format")), (False,)
        )
        group_size(quantisation)
    return str(method)


def group_size(quantisation: Mapping[str, Any], other_name: str = "group_size") -> int | None:
    """Columns that share a scale, by default 128; None where all columns of a weight do."""
    size = quantisation.get("group_size", quantisation.get(other_name, 128))
    if type(size) is not int or (size < 1 and size != -1):
        raise UnsupportedModelError(
            f"group_size in the quantization_config must be a number above 0 or -1, got {size!r}."
        )
    return None if size == -1 else size


def weight_schemes(quantisation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """How compressed-tensors stores weights, one scheme for each group of layers."""
    groups = quantisation.get("config_groups")
    schemes = [
        group["weights"]
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
    ]
    if not schemes:
        raise UnsupportedModelError(
            f"The {COMPRESSED} config_groups in config.json do not say how weights are quantised."
        )
    return schemes


def _compressed_format(quantisation: Mapping[str, Any]) -> str:
    schemes = weight_schemes(quantisation)
    named = quantisation.get("format")
    formats = (*_TYPES, NAIVE_QUANTIZED)
    _check(quantisation, "format", named, formats)
    for group in quantisation["config_groups"].values():
        if not isinstance(group, Mapping):
            raise UnsupportedModelError(
                f"The {COMPRESSED} config_groups in config.json must be objects, got {group!r}."
            )
        _check(quantisation, "format of a group", group.get("format") or named, (named,))
    kind = named
    if named == NAIVE_QUANTIZED:
        kind = FLOAT_QUANTIZED if schemes[0].get("type") == "float" else INT_QUANTIZED
    type_, bits, strategies = _TYPES[str(kind)]
    for scheme in schemes:
        _check(quantisation, "type of weights", scheme.get("type", "int"), (type_,))
        _check(quantisation, "num_bits of weights", scheme.get("num_bits", 8), bits)
        _check(quantisation, "strategy of weights", strategy(scheme), strategies)
        if strategy(scheme) == "group":
            group_size(scheme)
    sparse = quantisation.get("sparsity_config") or {}
    sparsity = sparse.get("format", "dense") if isinstance(sparse, Mapping) else sparse
    _check(quantisation, "sparsity format", sparsity, ("dense",))
    if quantisation.get("transform_config"):
        raise UnsupportedModelError(
            f"The model's {COMPRESSED} weights are rotated (transform_config); that is not "
            "supported. Use a checkpoint without transforms."
        )
    if kind == FLOAT_QUANTIZED:
        float_block(quantisation)
    return str(kind)


def strategy(scheme: Mapping[str, Any]) -> str:
    """Which elements share a scale: tensor, channel (a row), group (columns of one) or block."""
    named = scheme.get("strategy")
    if named is None:
        named = "tensor" if scheme.get("group_size") is None else "group"
        named = "channel" if scheme.get("group_size") == -1 else named
    return str(named)


def float_block(quantisation: Mapping[str, Any]) -> list[int] | None:
    """Rows and columns that share a scale in "float-quantized" weights; None for rows or all."""
    schemes = weight_schemes(quantisation)
    blocks = [s.get("block_structure") for s in schemes if strategy(s) == "block"]
    if not blocks:
        return None
    if len(blocks) < len(schemes) or any(block != blocks[0] for block in blocks):
        raise UnsupportedModelError(
            f"The model's {COMPRESSED} weights are partly in blocks, or in blocks of several sizes."
        )
    sizes = blocks[0].split("x") if isinstance(blocks[0], str) else blocks[0]
    if not isinstance(sizes, list) or not all(str(size).isdecimal() for size in sizes):
        raise UnsupportedModelError(
            f"block_structure in config.json must be two numbers, got {blocks[0]!r}."
        )
    return [int(size) for size in sizes]


def _check(quantisation: Mapping[str, Any], what: str, got: Any, known: tuple[Any, ...]) -> None:
    if got not in known:
        raise UnsupportedModelError(
            f"The model is quantised with {quantisation['quant_method']!r} and {what} {got!r}; "
            f"supported: {', '.join(map(str, known))}."
        )
