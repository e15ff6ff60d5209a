"""Block hashes: vectors, extra keys, and what must and must not change them."""

from __future__ import annotations

import sys
from array import array

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jubako.kv_cache import (
    BlockHashListWithBlockSize,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    get_hash_fn_by_name,
    get_request_block_hasher,
    hash_block_tokens,
    hashing,
    init_none_hash,
    make_block_hash_with_group_id,
    need_extra_keys,
)
from jubako.kv_cache.events import external_block_hash
from jubako.scheduler import LoRARequest

from .fakes import NIGHTLY, feature, lora, request

ALGORITHMS = ["blake2b", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]


def hash_fn(name):
    pytest.importorskip("cbor2" if "cbor" in name else "sys")
    pytest.importorskip("xxhash" if "xxhash" in name else "sys")
    return get_hash_fn_by_name(name)


@pytest.fixture
def seeded(monkeypatch):
    """`NONE_HASH` from seed "0", put back afterwards."""
    monkeypatch.setattr(hashing, "NONE_HASH", hashing.NONE_HASH)
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def test_packing():
    key = make_block_hash_with_group_id(b"h1", 258)
    assert key == b"h1\x00\x00\x01\x02"
    assert get_block_hash(key) == b"h1"
    assert get_group_id(key) == 258
    for group_id in (-1, 2**32):
        with pytest.raises(OverflowError):
            make_block_hash_with_group_id(b"h1", group_id)


def test_external_hash():
    value = bytes(range(32))
    assert external_block_hash(value, as_int=True) == 0x18191A1B1C1D1E1F
    assert external_block_hash(value, as_int=False) == value


@pytest.mark.parametrize(
    ("name", "none", "first", "second", "with_key"),
    [
        ("sha256", "1973e23848344dc4", "762b2e7e1520febd", "9e62b5a7ec298f33", "7d35f5b4fd0a19ad"),
        (
            "sha256_cbor",
            "4e1195df020de59e",
            "c9d58ba695280d69",
            "24125b23e68883b5",
            "9f18f4e82760e403",
        ),
        ("xxhash", "6fb31cc38bba6066", "f3856cedd7e63609", "0c9832567b17003b", "90c7c6e23bd304a6"),
        (
            "xxhash_cbor",
            "1ebe36576dcb573f",
            "0a8577df5ee34305",
            "d152782cb4d753bd",
            "8ad2cd30575e8e1e",
        ),
        ("blake2b", "0fd923ca5e7218c4", "7bfde678a4dd5991", "69e00e39fca76bd8", "4d5947740bc73e96"),
    ],
)
def test_vectors(seeded, name, none, first, second, with_key):
    function = hash_fn(name)
    init_none_hash(function)
    a = hash_block_tokens(function, None, [1, 2, 3, 4])
    assert a == hash_block_tokens(function, b"", (1, 2, 3, 4))
    b = hash_block_tokens(function, a, [5, 6, 7, 8])
    c = hash_block_tokens(function, a, [5, 6, 7, 8], ("lora-a",))
    assert [h[:8].hex() for h in (hashing.NONE_HASH, a, b, c)] == [none, first, second, with_key]
    assert len(a) == (16 if "xxhash" in name else 32)


def test_unknown_algorithm():
    with pytest.raises(ValueError, match="'md5' is unknown; known are blake2b, sha256"):
        get_hash_fn_by_name("md5")


def test_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "cbor2", None)
    hashing._module.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"jubako\[hashes\]"):
        get_hash_fn_by_name("sha256_cbor")
    hashing._module.cache_clear()


@pytest.mark.parametrize("seed", [None, "", "random"])
def test_no_seed_is_random(monkeypatch, seeded, seed, caplog):
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED")
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    seen = set()
    for name in ("sha256", "sha256_cbor"):
        init_none_hash(hash_fn(name))
        seen.add(hashing.NONE_HASH)
        assert len(hashing.NONE_HASH) == 32
    assert len(seen) == 2
    assert caplog.text.count("PYTHONHASHSEED is not set") == 1


@pytest.mark.parametrize("name", ALGORITHMS)
def test_only_content_counts(name):
    """Not which object holds it, nor which integer type."""
    function = hash_fn(name)
    one = "".join(["ima", "ge"])
    other = "".join(["im", "age"])
    assert one is not other
    parent = b"p" * 32
    tokens = [1, 2, 3, 4]
    expected = hash_block_tokens(function, parent, tokens, ((one, 1), (one, -3), "s", b"d" * 32))
    pair = (one, 1)
    for keys in (
        ((one, 1), (other, -3), "s", b"d" * 32),
        (pair, (other, np.int64(-3)), "s", bytes(bytearray(b"d" * 32))),
    ):
        assert hash_block_tokens(function, parent, tokens, keys) == expected
    twice = hash_block_tokens(function, parent, tokens, (pair, pair))
    assert twice == hash_block_tokens(function, parent, tokens, ((one, 1), (other, 1)))
    for same in (
        (1, 2, 3, 4),
        np.array(tokens, np.int32),
        np.array(tokens, np.int64),
        array("i", tokens),
        [np.int32(t) for t in tokens],
        range(1, 5),
    ):
        assert hash_block_tokens(function, parent, same, (pair, (one, -3), "s", b"d" * 32)) == (
            expected
        )
    assert hash_block_tokens(function, parent, [1, 2, 3, 5]) != expected


def test_token_out_of_range():
    with pytest.raises(OverflowError):
        hash_block_tokens(hash_fn("blake2b"), b"p", [2**31])


def test_hash_list():
    hashes = [bytes([c]) for c in b"ABCDEFG"]
    view = BlockHashListWithBlockSize(hashes, 4, 12)
    assert len(view) == 2
    assert list(view) == [b"ABC", b"DEF"]
    assert view[1] == b"DEF"
    assert view[0:5] == [b"ABC", b"DEF"]
    assert view[1:] == [b"DEF"]
    for index in (2, -1):
        with pytest.raises(IndexError):
            view[index]
    with pytest.raises(TypeError, match="not str"):
        view["0"]
    with pytest.raises(AssertionError, match="12 is not a multiple of 5"):
        BlockHashListWithBlockSize(hashes, 5, 12)


# Extra keys


def keys_of(req, block_size=4):
    index, found = 0, []
    for start in range(0, req.num_tokens, block_size):
        keys, index = generate_block_hash_extra_keys(req, start, start + block_size, index)
        found.append(keys)
    return found


def test_extra_keys():
    req = request(
        "a", 12, lora_request=lora("ad1"), cache_salt="s9", mm_features=[feature("A", 2, 5)]
    )
    assert keys_of(req) == [("ad1", ("A", 2), "s9"), ("ad1", ("A", -2)), ("ad1",)]
    req = request("a", 20, mm_features=[feature("A", 2, 2), feature("B", 5, 9)])
    assert keys_of(req) == [(("A", 2),), (("B", 1),), (("B", -3),), (("B", -7),), None]
    assert keys_of(request("a", 8, cache_salt="")) == [None, None]
    assert keys_of(request("a", 8, cache_salt="s")) == [("s",), None]
    assert keys_of(request("a", 8)) == [None, None]
    assert keys_of(request("a", 4, lora_request=lora("ad1", 3))) == [("ad1", 3)]


def test_adapter_that_was_loaded_again():
    old, new = (LoRARequest("x", 1, load_generation=n) for n in (0, 2))
    assert keys_of(request("a", 4, lora_request=old)) == [("x",)]
    assert keys_of(request("a", 4, lora_request=new)) == [("x", 2)]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=LoRARequest) == new


def test_media_example():
    req = request("a", 64, mm_features=[feature("A", 5, 27), feature("B", 32, 8)])
    assert keys_of(req, 16) == [(("A", 5),), (("A", -11),), (("B", 0),), None]


def test_media_index_from_the_end():
    req = request("a", 20, mm_features=[feature("A", 2, 2), feature("B", 5, 9)])
    assert generate_block_hash_extra_keys(req, 8, 12, -1) == ((("B", -3),), 1)
    assert generate_block_hash_extra_keys(req, 16, 20, -1)[0] is None


def test_overlapping_media():
    req = request("a", 8, mm_features=[feature("video", 0, 8), feature("sound", 2, 1)])
    assert keys_of(req) == [(("video", 0), ("sound", 2)), (("video", -4),)]


def test_prompt_embeds():
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    req = request("a", 12, prompt_embeds=rows)
    (a,), (b,), (c,) = keys_of(req)
    assert len({a, b, c}) == 3
    assert {len(a), len(b), len(c)} == {32}
    changed = rows.copy()
    changed[5] = 7
    other = request("a", 12, prompt_embeds=changed)
    assert other.block_hashes[0] == req.block_hashes[0]
    assert other.block_hashes[1] != req.block_hashes[1]
    assert not need_extra_keys(req)


def test_need_extra_keys():
    assert not need_extra_keys(request("a", 4))
    assert need_extra_keys(request("a", 4, cache_salt=""))
    assert need_extra_keys(request("a", 4, lora_request=lora("x")))
    assert need_extra_keys(request("a", 4, mm_features=[feature("A", 0, 1)]))


# The request hasher


def test_hasher_steps():
    req = request("a", 10)
    assert len(req.block_hashes) == 2
    req.extend([10])
    assert len(req.block_hashes) == 2
    req.extend([11, 12, 13])
    assert req.block_hashes == request("b", 14).block_hashes
    assert len(req.block_hashes) == 3


def test_hasher_sets_the_none_hash(monkeypatch):
    monkeypatch.setattr(hashing, "NONE_HASH", b"")
    get_request_block_hasher(4, hash_fn("blake2b"))
    assert hashing.NONE_HASH


def test_salt_is_no_adapter():
    salted = request("a", 8, cache_salt="x").block_hashes
    adapted = request("b", 8, lora_request=lora("x")).block_hashes
    assert salted[0] != adapted[0]
    assert salted[1] != adapted[1]


# An item's identifier stands for its content, and so for its length.
ITEMS = {"A": 1, "B": 3, "C": 3, "D": 6}
MEDIA = st.lists(
    st.tuples(st.sampled_from(sorted(ITEMS.items())), st.integers(0, 4)).map(
        lambda item: (*item[0], item[1])
    ),
    max_size=3,
)
INPUTS = st.fixed_dictionaries(
    {
        "tokens": st.lists(st.integers(0, 1), min_size=4, max_size=18),
        "media": MEDIA,
        "lora": st.sampled_from([None, "x", "y"]),
        "salt": st.sampled_from([None, "", "x", "z"]),
        "embeds": st.sampled_from([None, 0, 1]),
    }
)


def build(inputs, n=None, **kwargs):
    at, features = 0, []
    for identifier, length, gap in inputs["media"]:
        features.append(feature("".join(identifier), at + gap, length))
        at += gap + length
    embeds = inputs["embeds"]
    return request(
        "r",
        inputs["tokens"][:n],
        mm_features=features,
        lora_request=lora(inputs["lora"]) if inputs["lora"] else None,
        cache_salt=inputs["salt"],
        prompt_embeds=None if embeds is None else np.full((6, 1), embeds, np.int8),
        **kwargs,
    )


def identity(inputs, end):
    """Everything that decides the KV of tokens before `end`."""
    at, media = 0, []
    for identifier, length, gap in inputs["media"]:
        start = at + gap
        # How much of an item lies beyond the prefix does not matter.
        media += [(identifier, start, p) for p in range(start, min(start + length, end))]
        at = start + length
    embeds = inputs["embeds"]
    return (
        inputs["tokens"][:end],
        media,
        inputs["lora"],
        inputs["salt"] or None,
        None if embeds is None else [embeds] * min(end, 6),
    )


@settings(max_examples=5000 if NIGHTLY else 300, deadline=None)
@given(INPUTS, INPUTS, st.sampled_from(ALGORITHMS))
def test_equal_inputs_equal_hashes(one, other, name):
    function = hash_fn(name)
    a, b = (build(inputs, hash_fn=function) for inputs in (one, other))
    for index, (x, y) in enumerate(zip(a.block_hashes, b.block_hashes)):
        end = (index + 1) * 4
        same = identity(one, end) == identity(other, end)
        if name == "blake2b" or same:
            assert (x == y) == same


@settings(max_examples=2000 if NIGHTLY else 200, deadline=None)
@given(INPUTS, st.integers(1, 5), st.sampled_from(ALGORITHMS))
def test_token_by_token_equals_at_once(inputs, stride, name):
    function = hash_fn(name)
    grown = build(inputs, 1, hash_fn=function)
    tokens = inputs["tokens"]
    for start in range(1, len(tokens), stride):
        grown.extend(tokens[start : start + stride])
    assert grown.block_hashes == build(inputs, hash_fn=function).block_hashes
