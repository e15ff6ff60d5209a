"""What does a layer keep in the KV cache, and how many bytes does a block of it take?

A `KVCacheSpec` describes one layer. Specs are frozen and compare by value: layers with equal specs
may share a block table. Dtypes are names, so that nothing here needs a tensor library, and
`encode_spec` / `decode_spec` turn a spec into plain builtins and back for the wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, Protocol, Self

from jubako.errors import ConfigError
from jubako.kv_cache.errors import ImpossibleCacheError

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int8": 1,
    "uint8": 1,
}

# One token of DeepSeek's fp8 MLA layout: 512 fp8 values, 4 float32 scales, 64 bfloat16 rope values.
FP8_DS_MLA_BYTES_PER_TOKEN = 656


class SizingConfig(Protocol):
    """The part of the engine's configuration that decides how much memory a request can need."""

    @property
    def model_config(self) -> Any: ...
    @property
    def scheduler_config(self) -> Any: ...
    @property
    def parallel_config(self) -> Any: ...
    @property
    def cache_config(self) -> Any: ...


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`. ConfigError for a name that is not in `DTYPE_BYTES`."""
    try:
        return DTYPE_BYTES[dtype]
    except KeyError:
        known = ", ".join(DTYPE_BYTES)
        raise ConfigError(f"KV cache dtype {dtype!r} is unknown; known are {known}") from None


def _padded(size: int, padded: int | None) -> int:
    if padded is None:
        return size
    if padded < size:
        raise ImpossibleCacheError(
            f"page_size_padded {padded} is below the page's real size {size}"
        )
    return padded


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """Base of all specs. `block_size` is in tokens."""

    block_size: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer."""
        raise NotImplementedError

    def max_memory_usage_bytes(self, config: SizingConfig) -> int:
        """Most bytes that one request of `max_model_len` tokens holds in one layer."""
        raise NotImplementedError

    def copy_with_new_block_size(self, block_size: int) -> Self:
        return replace(self, block_size=block_size)

    @classmethod
    def merge(cls, specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
        """The one spec of a group of layers with these specs. AssertionError if there is none."""
        assert all(spec == specs[0] for spec in specs), (
            f"layers with different KV cache specs cannot share a group: {_distinct(specs)}"
        )
        return replace(specs[0])


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of `num_kv_heads` heads of `head_size` elements for every token.

    Each key and each value has `scale_bytes` more, by which its elements are read.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    scale_bytes: int = 0
    page_size_padded: int | None = None

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one block before padding."""
        row = self.head_size * dtype_bytes(self.dtype) + self.scale_bytes
        return 2 * self.block_size * self.num_kv_heads * row

    @property
    def page_size_bytes(self) -> int:
        return _padded(self.real_page_size_bytes, self.page_size_padded)


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token is kept.

    `sliding_window` or `attention_chunk_size` is remembered for layers whose kernel masks although
    their cache keeps everything (the hybrid manager is off).
    """

    head_size_v: int = None  # type: ignore[assignment]  # None becomes head_size
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)

    @property
    def real_page_size_bytes(self) -> int:
        rows = (self.head_size + self.head_size_v) * dtype_bytes(self.dtype) + 2 * self.scale_bytes
        return self.block_size * self.num_kv_heads * rows

    def max_memory_usage_bytes(self, config: SizingConfig) -> int:
        parallel = config.parallel_config
        ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
        tokens = cdiv(config.model_config.max_model_len, ranks)
        return cdiv(tokens, self.block_size) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
        """As the base; at most one window or one chunk size among the members is kept.

        ValueError for two different windows or two different chunk sizes.
        """
        first = specs[0]
        assert isinstance(first, FullAttentionSpec)
        full = [spec for spec in specs if type(spec) is type(first)]
        assert len(full) == len(specs), f"not all of one full attention type: {_distinct(specs)}"
        bare = {replace(spec, sliding_window=None, attention_chunk_size=None) for spec in full}
        assert len(bare) == 1, f"full attention layers differ: {_distinct(specs)}"
        window = _only("sliding windows", [spec.sliding_window for spec in full])
        chunk = _only("attention chunk sizes", [spec.attention_chunk_size for spec in full])
        assert window is None or chunk is None, (
            f"sliding window {window} and attention chunk size {chunk} in one group"
        )
        return replace(first, sliding_window=window, attention_chunk_size=chunk)


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Multi-head latent attention: one latent vector for each token, no separate value."""

    cache_dtype_str: str | None = None

    @property
    def real_page_size_bytes(self) -> int:
        if self.cache_dtype_str == "fp8_ds_mla":
            return self.block_size * FP8_DS_MLA_BYTES_PER_TOKEN
        return self.block_size * self.num_kv_heads * self.head_size * dtype_bytes(self.dtype)

    @classmethod
    def merge(cls, specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
        mla = [spec for spec in specs if isinstance(spec, MLAAttentionSpec)]
        assert len(mla) == len(specs), f"not all MLA: {_distinct(specs)}"
        cache_dtypes = {spec.cache_dtype_str for spec in mla}
        assert len(cache_dtypes) == 1, f"MLA layers differ in cache_dtype_str: {cache_dtypes}"
        return super().merge(specs)


@dataclass(frozen=True, kw_only=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention with `sink_len` learned tokens that every request sees."""

    sink_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A token sees itself and the `sliding_window - 1` tokens before it."""

    sliding_window: int

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int
    ) -> int:
        """Most blocks that one request holds at once."""
        tokens = min(self.sliding_window - 1 + max_num_batched_tokens, max_model_len)
        # One more, since a window may begin inside a block.
        return cdiv(tokens, self.block_size) + 1

    def max_memory_usage_bytes(self, config: SizingConfig) -> int:
        dcp = config.parallel_config.decode_context_parallel_size
        if dcp != 1:
            raise ImpossibleCacheError(
                f"decode_context_parallel_size is {dcp}; with sliding-window layers it must be 1",
                "decode_context_parallel_size",
            )
        return _capped_bytes(self, config)


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A token sees the tokens of its own chunk of `attention_chunk_size`."""

    attention_chunk_size: int

    def max_admission_blocks_per_request(
        self, max_num_batched_tokens: int, max_model_len: int
    ) -> int:
        """Most blocks that one request holds at once."""
        tokens = min(self.attention_chunk_size + max_num_batched_tokens, max_model_len)
        return cdiv(tokens, self.block_size)

    def max_memory_usage_bytes(self, config: SizingConfig) -> int:
        return _capped_bytes(self, config)


def _capped_bytes(spec: SlidingWindowSpec | ChunkedLocalAttentionSpec, config: SizingConfig) -> int:
    longest = config.model_config.max_model_len
    # An unset step budget may at most be the whole context.
    step = config.scheduler_config.max_num_batched_tokens or longest
    blocks = spec.max_admission_blocks_per_request(step, longest)
    return blocks * spec.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """A block is one snapshot of a recurrent state, whatever its `block_size`."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    page_size_padded: int | None = None
    mamba_type: str = "mamba2"
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of one snapshot before padding."""
        states = zip(self.shapes, self.dtypes, strict=True)
        return sum(prod(shape) * dtype_bytes(dtype) for shape, dtype in states)

    @property
    def page_size_bytes(self) -> int:
        return _padded(self.real_page_size_bytes, self.page_size_padded)

    def max_memory_usage_bytes(self, config: SizingConfig) -> int:
        mode = config.cache_config.mamba_cache_mode
        if mode == "all":
            snapshots = cdiv(config.model_config.max_model_len, self.block_size)
        else:
            # align: the state being read and the state being written.
            snapshots = 2 if mode == "align" else 1
        return (snapshots + self.num_speculative_blocks) * self.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Keys and values of the encoder's output, fixed for the life of a request."""

    def max_memory_usage_bytes(self, config: SizingConfig) -> int:
        tokens = config.scheduler_config.max_num_encoder_input_tokens
        return cdiv(tokens, self.block_size) * self.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Attention inside one step only: nothing is kept, and no group is formed."""

    def max_memory_usage_bytes(self, config: SizingConfig) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers of one attention type but different page sizes: one table, a tensor for each layer."""

    kv_cache_specs: dict[str, KVCacheSpec]

    @property
    def page_size_bytes(self) -> int:
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def max_memory_usage_bytes(self, config: SizingConfig) -> int:
        pages = max(
            cdiv(spec.max_memory_usage_bytes(config), spec.page_size_bytes)
            for spec in self.kv_cache_specs.values()
        )
        return pages * self.page_size_bytes

    def copy_with_new_block_size(self, block_size: int) -> Self:
        layers = {
            name: spec.copy_with_new_block_size(block_size)
            for name, spec in self.kv_cache_specs.items()
        }
        return replace(self, block_size=block_size, kv_cache_specs=layers)

    @classmethod
    def is_uniform_type(cls, specs: Mapping[str, KVCacheSpec]) -> bool:
        """True if the layers need the same blocks for every request, whatever their page sizes.

        NotImplementedError if the first spec is of a type that has no rule.
        """
        layers = list(specs.values())
        first = layers[0]
        if any(spec.block_size != first.block_size for spec in layers):
            return False
        if isinstance(first, FullAttentionSpec):
            # Sinks stand before the other blocks of a table, so all its layers have them or none.
            full = [spec for spec in layers if isinstance(spec, FullAttentionSpec)]
            return len(full) == len(layers) and len({_sink_len(spec) for spec in full}) == 1
        if isinstance(first, CrossAttentionSpec):
            return all(isinstance(spec, CrossAttentionSpec) for spec in layers)
        if isinstance(first, SlidingWindowSpec):
            return all(
                isinstance(spec, SlidingWindowSpec) and spec.sliding_window == first.sliding_window
                for spec in layers
            )
        if isinstance(first, ChunkedLocalAttentionSpec):
            return all(
                isinstance(spec, ChunkedLocalAttentionSpec)
                and spec.attention_chunk_size == first.attention_chunk_size
                for spec in layers
            )
        if isinstance(first, MambaSpec):
            return all(
                isinstance(spec, MambaSpec)
                and spec.num_speculative_blocks == first.num_speculative_blocks
                for spec in layers
            )
        raise NotImplementedError(f"no rule for KV cache specs of type {type(first).__name__}")

    @classmethod
    def from_specs(cls, specs: Mapping[str, KVCacheSpec]) -> UniformTypeKVCacheSpecs | None:
        """The group spec of these layers, or None if they are not of one type."""
        if not cls.is_uniform_type(specs):
            return None
        first = next(iter(specs.values()))
        return cls(block_size=first.block_size, kv_cache_specs=dict(specs))


def is_kv_cache_spec_uniform(specs: Mapping[str, KVCacheSpec]) -> bool:
    """True if all layers can be merged into one spec (also for no layers at all)."""
    layers = list(specs.values())
    if not layers:
        return True
    try:
        type(layers[0]).merge(layers)
    except (AssertionError, ValueError):
        return False
    return True


SPEC_TYPES: dict[str, type[KVCacheSpec]] = {
    cls.__name__: cls
    for cls in (
        FullAttentionSpec,
        MLAAttentionSpec,
        SinkFullAttentionSpec,
        SlidingWindowSpec,
        ChunkedLocalAttentionSpec,
        MambaSpec,
        CrossAttentionSpec,
        EncoderOnlyAttentionSpec,
        UniformTypeKVCacheSpecs,
    )
}


def encode_spec(spec: KVCacheSpec) -> dict[str, Any]:
    """`spec` as builtins that msgpack and JSON carry, its class name under `"type"`."""
    encoded: dict[str, Any] = {"type": type(spec).__name__}
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name == "kv_cache_specs":
            value = {name: encode_spec(layer) for name, layer in value.items()}
        elif isinstance(value, tuple):
            value = [list(item) if isinstance(item, tuple) else item for item in value]
        encoded[field.name] = value
    return encoded


def decode_spec(encoded: Mapping[str, Any]) -> KVCacheSpec:
    """The inverse of `encode_spec`. ValueError for a type name that is no spec."""
    name = encoded["type"]
    if name not in SPEC_TYPES:
        raise ValueError(f"{name!r} is no KV cache spec; known are {', '.join(SPEC_TYPES)}")
    values = {key: value for key, value in encoded.items() if key != "type"}
    for key, value in values.items():
        if key == "kv_cache_specs":
            values[key] = {layer: decode_spec(spec) for layer, spec in value.items()}
        elif isinstance(value, (list, tuple)):
            values[key] = tuple(
                tuple(item) if isinstance(item, (list, tuple)) else item for item in value
            )
    return SPEC_TYPES[name](**values)


def _sink_len(spec: FullAttentionSpec) -> int:
    return (spec.sink_len or 0) if isinstance(spec, SinkFullAttentionSpec) else 0


def _only(what: str, values: Sequence[int | None]) -> int | None:
    distinct = sorted({value for value in values if value is not None})
    if len(distinct) > 1:
        raise ValueError(f"layers with different {what} cannot share a group: {distinct}")
    return distinct[0] if distinct else None


def _distinct(specs: Sequence[KVCacheSpec]) -> str:
    seen: list[KVCacheSpec] = []
    for spec in specs:
        if spec not in seen:
            seen.append(spec)
    return "; ".join(map(repr, seen))
