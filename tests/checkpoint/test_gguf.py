"""The GGUF reader: what it reads, that it agrees with the `gguf` package, what it refuses."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as QuantType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jubako.checkpoint.gguf import TENSOR_TYPES, GGUFArray, GGUFFile
from jubako.errors import CheckpointError

from .gguf_files import finish

LONG = "x" * 300


def write_sample(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -100)
    writer.add_uint16("t.u16", 60000)
    writer.add_int16("t.i16", -30000)
    writer.add_uint32("t.u32", 4_000_000_000)
    writer.add_int32("t.i32", -2_000_000_000)
    writer.add_uint64("t.u64", 2**63)
    writer.add_int64("t.i64", -(2**62))
    writer.add_float32("t.f32", 0.5)
    writer.add_float64("t.f64", 0.1)
    writer.add_bool("t.yes", True)
    writer.add_bool("t.no", False)
    writer.add_string("t.text", "重箱")
    writer.add_array("t.strings", ["a", "", "重箱", "a"])
    writer.add_array("t.long", ["short", LONG, "end"])
    writer.add_array("t.floats", [0.5, -1.5])
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_array("t.bools", [True, False])
    writer.add_tensor("a.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    blocks = np.arange(2 * 3 * 34, dtype=np.uint8).reshape(2, 3 * 34)
    writer.add_tensor("b.weight", blocks, raw_dtype=QuantType.Q8_0)
    writer.add_tensor("c.weight", np.arange(7, dtype=np.float16))
    finish(writer)
    return path


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("gguf") / "sample.gguf")


def test_metadata_of_every_type(sample: Path) -> None:
    values = GGUFFile(sample).metadata
    assert values["general.architecture"] == "llama"
    assert [values[f"t.{k}"] for k in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")] == [
        200,
        -100,
        60000,
        -30000,
        4_000_000_000,
        -2_000_000_000,
        2**63,
        -(2**62),
    ]
    assert values["t.f32"] == 0.5
    assert values["t.f64"] == 0.1
    assert values["t.yes"] is True
    assert values["t.no"] is False
    assert values["t.text"] == "重箱"
    assert values["t.strings"].tolist() == ["a", "", "重箱", "a"]
    assert values["t.floats"].tolist() == [0.5, -1.5]
    assert values["t.ints"].numpy().tolist() == [1, -2, 3]
    assert values["t.bools"].tolist() == [True, False]


def test_strings_longer_than_a_byte_can_count(sample: Path) -> None:
    array = GGUFFile(sample).metadata["t.long"]
    assert array.tolist() == ["short", LONG, "end"]
    assert array[1] == LONG
    assert len(array) == 3


def test_find_gives_the_first_index_and_leaves_out_what_is_missing(sample: Path) -> None:
    array = GGUFFile(sample).metadata["t.strings"]
    assert array.find(["a", "重箱", "", "b", "重"]) == {"a": 0, "重箱": 2, "": 1}


def test_tensors_have_shapes_outermost_first_and_their_bytes(sample: Path) -> None:
    file = GGUFFile(sample)
    assert list(file.tensors) == ["a.weight", "b.weight", "c.weight"]
    a, b, c = file.tensors.values()
    assert (a.shape, a.type, a.nbytes, a.numel) == ((3, 4), "F32", 48, 12)
    assert (b.shape, b.type, b.nbytes, b.numel) == ((2, 96), "Q8_0", 204, 192)
    assert (c.shape, c.type) == ((7,), "F16")
    assert file.read("a.weight").view(np.float32).tolist() == list(range(12))
    assert file.read("b.weight").tolist() == [i % 256 for i in range(204)]
    assert file.read("c.weight").view(np.float16).tolist() == list(range(7))


def test_agrees_with_the_gguf_package(sample: Path) -> None:
    file = GGUFFile(sample)
    reader = gguf.GGUFReader(sample)
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert ours.offset == tensor.data_offset
        assert ours.nbytes == tensor.n_bytes
        assert ours.type == tensor.tensor_type.name
        assert list(ours.shape) == list(reversed(tensor.shape.tolist()))


def test_type_table_is_that_of_the_gguf_package() -> None:
    for kind, (block, nbytes) in gguf.GGML_QUANT_SIZES.items():
        assert TENSOR_TYPES[kind.value] == (kind.name, block, nbytes)


# -- refusals ---------------------------------------------------------------------------------


def damaged(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    return path


def test_no_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"damaged\.gguf is not a GGUF file.*PK"):
        GGUFFile(damaged(tmp_path, b"PK\x03\x04" + bytes(100)))
    with pytest.raises(CheckpointError, match=r"not a GGUF file"):
        GGUFFile(damaged(tmp_path, b""))


@pytest.mark.parametrize("version", [0, 1, 4, 77])
def test_other_versions(sample: Path, tmp_path: Path, version: int) -> None:
    data = bytearray(sample.read_bytes())
    struct.pack_into("<I", data, 4, version)
    with pytest.raises(CheckpointError, match=f"version {version}; versions 2 and 3"):
        GGUFFile(damaged(tmp_path, data))


def test_big_endian(sample: Path, tmp_path: Path) -> None:
    data = bytearray(sample.read_bytes())
    struct.pack_into(">I", data, 4, 3)
    with pytest.raises(CheckpointError, match="big-endian"):
        GGUFFile(damaged(tmp_path, data))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.gguf cannot be opened") as error:
        GGUFFile(tmp_path / "none.gguf")
    assert str(tmp_path) not in str(error.value)


def test_every_truncation_is_said(sample: Path, tmp_path: Path) -> None:
    data = sample.read_bytes()
    header = GGUFFile(sample).header_bytes
    last = max(t.offset + t.nbytes for t in GGUFFile(sample).tensors.values())
    for length in [*range(40), *range(40, last, 7), header - 1, header, last - 1]:
        with pytest.raises(CheckpointError, match=r"cut short|not a GGUF file"):
            GGUFFile(damaged(tmp_path, data[:length]))


def test_truncated_data_names_the_tensor(sample: Path, tmp_path: Path) -> None:
    data = sample.read_bytes()
    last = max(GGUFFile(sample).tensors.values(), key=lambda t: t.offset)
    with pytest.raises(CheckpointError, match=r"cut short: tensor 'c\.weight' would end at byte"):
        GGUFFile(damaged(tmp_path, data[: last.offset + 3]))


def test_unknown_tensor_type_is_named(sample: Path, tmp_path: Path) -> None:
    data = bytearray(sample.read_bytes())
    at = data.index(b"b.weight") + len(b"b.weight") + 4 + 2 * 8
    struct.pack_into("<I", data, at, 99)
    with pytest.raises(CheckpointError, match=r"tensor 'b\.weight' of unknown type 99"):
        GGUFFile(damaged(tmp_path, data))


def test_rows_that_do_not_fit_the_blocks(sample: Path, tmp_path: Path) -> None:
    data = bytearray(sample.read_bytes())
    at = data.index(b"b.weight") + len(b"b.weight") + 4
    struct.pack_into("<Q", data, at, 95)
    with pytest.raises(CheckpointError, match=r"Q8_0 with rows of 95 elements.*multiple of 32"):
        GGUFFile(damaged(tmp_path, data))


def test_string_that_is_not_utf8(sample: Path, tmp_path: Path) -> None:
    data = bytearray(sample.read_bytes())
    data[data.index("重箱".encode())] = 0xFF
    with pytest.raises(CheckpointError, match=r"'t\.text' that is not UTF-8"):
        GGUFFile(damaged(tmp_path, data))


def test_string_of_an_array_that_is_not_utf8(sample: Path, tmp_path: Path) -> None:
    data = bytearray(sample.read_bytes())
    first = data.index("重箱".encode())
    data[data.index("重箱".encode(), first + 1)] = 0xFF
    array = GGUFFile(damaged(tmp_path, data)).metadata["t.strings"]
    with pytest.raises(CheckpointError, match=r"'t\.strings' holds a string that is not UTF-8"):
        array.tolist()


def test_file_cut_while_open(sample: Path, tmp_path: Path) -> None:
    path = damaged(tmp_path, sample.read_bytes())
    file = GGUFFile(path)
    with open(path, "r+b") as handle:
        handle.truncate(file.header_bytes)
    with pytest.raises(CheckpointError, match="cut short"):
        file.read("a.weight")


flips = st.lists(
    st.tuples(st.integers(0, 2**31), st.one_of(st.integers(0, 255), st.just(255))),
    max_size=6,
)


@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(flips=flips, cut=st.one_of(st.none(), st.integers(0, 2000)))
def test_damage_raises_checkpoint_errors_only(
    sample: Path, tmp_path: Path, flips: list[tuple[int, int]], cut: int | None
) -> None:
    data = bytearray(sample.read_bytes())
    header = GGUFFile(sample).header_bytes
    for at, value in flips:
        data[4 + at % (header - 4)] = value
    tracemalloc.start()
    try:
        file = GGUFFile(damaged(tmp_path, data if cut is None else data[:cut]))
        for value in file.metadata.values():
            if isinstance(value, GGUFArray):
                value.tolist()
        for name in file.tensors:
            file.read(name)
    except CheckpointError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1_000_000
