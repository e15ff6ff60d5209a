"""How do the tokens of a block, and all before them, become a hash?

A block's hash covers its parent's, so that it stands for the whole prefix. The default, `blake2b`,
reads raw token bytes. The other four serialise `(parent, tokens, extra keys)` as other engines do,
so that hashes can be exchanged with them.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from hashlib import blake2b as _blake2b
from hashlib import sha256 as _sha256
from importlib import import_module
from struct import error as struct_error
from struct import iter_unpack, pack
from typing import Any, overload

import msgspec

from jubako.kv_cache.blocks import GROUP_ID_BYTES, BlockHash, BlockHashWithGroupId

logger = logging.getLogger(__name__)

HashFunction = Callable[[Any], bytes]
ExternalBlockHash = bytes | int

_DIGEST_BYTES = 32
_EXTRA_KEYS_PERSON = b"jbk-extra"
_pack_extra_keys = msgspec.msgpack.encode

NONE_HASH = BlockHash(b"")
"""Parent of every first block; empty until `init_none_hash` has run."""


def make_block_hash_with_group_id(block_hash: BlockHash, group_id: int) -> BlockHashWithGroupId:
    """OverflowError for a group id below 0 or from 2**32 on."""
    return BlockHashWithGroupId(block_hash + group_suffix(group_id))


def group_suffix(group_id: int) -> bytes:
    """What is appended to a block hash to make it a key of that group."""
    return group_id.to_bytes(GROUP_ID_BYTES, "big")


def get_block_hash(key: BlockHashWithGroupId) -> BlockHash:
    return BlockHash(key[:-GROUP_ID_BYTES])


def get_group_id(key: BlockHashWithGroupId) -> int:
    return group_of(key[-GROUP_ID_BYTES:])


def group_of(suffix: bytes) -> int:
    """The group whose `group_suffix` it is."""
    return int.from_bytes(suffix, "big")


def sha256(value: Any) -> bytes:
    return _sha256(_pickled(value)).digest()


def sha256_cbor(value: Any) -> bytes:
    return _sha256(_cbor(value)).digest()


def xxhash(value: Any) -> bytes:
    return bytes(_module("xxhash").xxh3_128_digest(_pickled(value)))


def xxhash_cbor(value: Any) -> bytes:
    return bytes(_module("xxhash").xxh3_128_digest(_cbor(value)))


def blake2b(value: Any) -> bytes:
    """BLAKE2b-256 of a seed string, or of `(parent, tokens, extra keys)`.

    `tokens` may be a buffer of int32 or any sequence of integers.
    """
    if isinstance(value, str):
        return _blake2b(value.encode(), digest_size=_DIGEST_BYTES).digest()
    parent, tokens, extra_keys = value
    return blake2b_block(parent, token_bytes(tokens), extra_keys)


def blake2b_block(parent: bytes, tokens: bytes, extra_keys: tuple[Any, ...] | None) -> bytes:
    """The hash of a block whose `tokens` are little-endian int32 bytes."""
    if extra_keys is not None:
        # A digest of fixed length keeps keys and tokens apart; the personalisation keeps a parent
        # with keys apart from any parent without.
        parent = _blake2b(
            parent + _pack_extra_keys(_canonical(extra_keys)),
            digest_size=_DIGEST_BYTES,
            person=_EXTRA_KEYS_PERSON,
        ).digest()
    return _blake2b(parent + tokens, digest_size=_DIGEST_BYTES).digest()


_EMPTY_BLAKE2B = _blake2b(digest_size=_DIGEST_BYTES)


def blake2b_next(parent: bytes, tokens: bytes) -> BlockHash:
    """`blake2b_block` without extra keys."""
    # Copying a state spares the parsing of its parameters.
    state = _EMPTY_BLAKE2B.copy()
    state.update(parent + tokens)
    return BlockHash(state.digest())


def blake2b_chain(parent: bytes, tokens: bytes, block_bytes: int) -> list[BlockHash]:
    """`blake2b_block`, without extra keys, for one block of `block_bytes` after another."""
    hashes: list[BlockHash] = []
    append = hashes.append
    copy = _EMPTY_BLAKE2B.copy
    for (chunk,) in iter_unpack(f"{block_bytes}s", tokens):
        state = copy()
        state.update(parent + chunk)
        parent = state.digest()
        append(parent)  # type: ignore[arg-type]  # a NewType costs a call
    return hashes


_HASH_FUNCTIONS: dict[str, tuple[HashFunction, tuple[str, ...]]] = {
    "blake2b": (blake2b, ()),
    "sha256": (sha256, ()),
    "sha256_cbor": (sha256_cbor, ("cbor2",)),
    "xxhash": (xxhash, ("xxhash",)),
    "xxhash_cbor": (xxhash_cbor, ("xxhash", "cbor2")),
}


def get_hash_fn_by_name(name: str) -> HashFunction:
    """ValueError for an unknown name, ModuleNotFoundError if its optional package is missing."""
    if name not in _HASH_FUNCTIONS:
        known = ", ".join(_HASH_FUNCTIONS)
        raise ValueError(f"prefix_caching_hash_algo {name!r} is unknown; known are {known}")
    function, packages = _HASH_FUNCTIONS[name]
    for package in packages:
        try:
            _module(package)
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                f"prefix_caching_hash_algo {name!r} needs the package {package}: "
                f"pip install 'jubako[hashes]'",
                name=package,
            ) from None
    return function


def init_none_hash(hash_fn: HashFunction) -> None:
    """Set the parent of all first blocks: from PYTHONHASHSEED where it is a number, else random.

    Processes whose hashes shall agree need the same seed and the same hash function.
    """
    global NONE_HASH
    seed = os.environ.get("PYTHONHASHSEED", "")
    # The two spellings of "no seed" must not become a seed that anybody can guess.
    if seed not in ("", "random"):
        NONE_HASH = BlockHash(hash_fn(seed))
        return
    if hash_fn in (sha256_cbor, xxhash_cbor):
        logger.warning(
            "PYTHONHASHSEED is not set, so block hashes will not match those of other processes"
        )
    NONE_HASH = BlockHash(os.urandom(_DIGEST_BYTES))


def hash_block_tokens(
    hash_function: HashFunction,
    parent_block_hash: BlockHash | None,
    curr_block_token_ids: Sequence[int],
    extra_keys: tuple[Any, ...] | None = None,
) -> BlockHash:
    """The hash of one full block. No parent means `NONE_HASH`."""
    parent = parent_block_hash or NONE_HASH
    if hash_function is blake2b:
        return BlockHash(blake2b((parent, curr_block_token_ids, extra_keys)))
    # Plain ints: NumPy's would hash differently, or not at all.
    tokens = tuple(map(int, curr_block_token_ids))
    return BlockHash(hash_function((parent, tokens, extra_keys)))


def token_bytes(tokens: Any) -> bytes:
    """Token ids as little-endian int32. OverflowError for an id that does not fit."""
    if not isinstance(tokens, (list, tuple)):
        try:
            view = memoryview(tokens)
        except TypeError:
            tokens = list(tokens)
        else:
            if view.format == "i" and sys.byteorder == "little":
                return view.tobytes()
            tokens = view.tolist()
    try:
        return pack(f"<{len(tokens)}i", *tokens)
    except struct_error as error:
        fits_kind = all(isinstance(token, int) for token in tokens)
        raise (OverflowError if fits_kind else TypeError)(f"token ids: {error}") from None


class BlockHashListWithBlockSize(Sequence[BlockHash]):
    """Hashes of blocks of `target_block_size` tokens: each the run of smaller hashes, joined."""

    def __init__(
        self, block_hashes: Sequence[BlockHash], hash_block_size: int, target_block_size: int
    ) -> None:
        assert target_block_size % hash_block_size == 0, (
            f"block size {target_block_size} is not a multiple of {hash_block_size}"
        )
        self.block_hashes = block_hashes
        self.scale_factor = target_block_size // hash_block_size

    def __len__(self) -> int:
        return len(self.block_hashes) // self.scale_factor

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockHash]: ...
    def __getitem__(self, index: int | slice) -> BlockHash | list[BlockHash]:
        if isinstance(index, slice):
            return [self._at(i) for i in range(*index.indices(len(self)))]
        if not isinstance(index, int):
            raise TypeError(f"index must be an int or a slice, not {type(index).__name__}")
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} block hashes")
        return self._at(index)

    def __iter__(self) -> Iterator[BlockHash]:
        return map(self._at, range(len(self)))

    def _at(self, index: int) -> BlockHash:
        start = index * self.scale_factor
        return BlockHash(b"".join(self.block_hashes[start : start + self.scale_factor]))


def hashes_at_block_size(
    block_hashes: Sequence[BlockHash], hash_block_size: int, target_block_size: int
) -> Sequence[BlockHash]:
    """Hashes of larger blocks, each the last of its run, which covers those before it."""
    assert target_block_size % hash_block_size == 0, (
        f"block size {target_block_size} is not a multiple of {hash_block_size}"
    )
    scale = target_block_size // hash_block_size
    return block_hashes if scale == 1 else block_hashes[scale - 1 :: scale]


@cache
def _module(name: str) -> Any:
    return import_module(name)


def _pickled(value: Any) -> bytes:
    # Only ever written, to be digested as other engines digest it; nothing here reads a pickle.
    return pickle.dumps(_canonical(value), protocol=pickle.HIGHEST_PROTOCOL)


def _cbor(value: Any) -> bytes:
    encoded: bytes = _module("cbor2").dumps(_canonical(value), canonical=True)
    return encoded


def _canonical(value: Any) -> Any:
    """`value` rebuilt so that its pickle depends on nothing but its content.

    A pickle refers back to an object it has seen, but writes an equal one anew. So equal strings
    and bytes become one object, tuples become new ones, and NumPy's integers plain ones.
    """
    return _rebuilt(value, {})


def _rebuilt(value: Any, seen: dict[Any, Any]) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        items = list(value)
        if {type(item) for item in items} != {int}:
            items = [_rebuilt(item, seen) for item in items]
        return tuple(items) if kind is tuple else items
    if kind is str or kind is bytes:
        return seen.setdefault(value, value)
    if value is None or kind in (int, bool, float):
        return value
    if hasattr(value, "__index__"):
        return int(value)
    return value
