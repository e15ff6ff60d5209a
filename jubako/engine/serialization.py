"""How does a record become bytes on a socket, and back?

A message is a list of frames: the first is msgpack, the others are the data of large arrays, which
are not copied. There is no pickle: an object that msgpack and the rules below cannot express is an
error of the sender, and no bytes that a reader gets can make it run code.

An array is extension type 1, whose payload is msgpack of `(dtype, shape, data)`; `data` is the
bytes themselves, or the number of the frame that holds them.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from jubako.errors import JubakoError

Frame = bytes | bytearray | memoryview
"""One part of a message on a socket."""

ARRAY_EXTENSION = 1

INLINE_LIMIT = 256
"""Arrays of fewer bytes travel inside the first frame; a frame of their own costs more."""

_DTYPES = frozenset(
    ["|b1", "|i1", "|u1", "<i2", "<u2", "<f2", "<i4", "<u4", "<f4", "<i8", "<u8", "<f8"]
)

T = TypeVar("T")


class SerializationError(JubakoError):
    """A message cannot be written, or what arrived is not a message of the expected kind."""


class _ArrayHeader(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: int | bytes


_header_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(_ArrayHeader)


class MsgpackEncoder:
    """Writes records. Not safe for use by two threads at once.

    The frames may view the arrays of the record: they must not change until the frames are sent.
    """

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_other)
        self._frames: list[Frame] = []

    def encode(self, record: object) -> list[Frame]:
        """The frames of `record`; `SerializationError` if it holds an object of no known kind."""
        frames: list[Frame] = [b""]
        self._frames = frames
        try:
            frames[0] = self._encoder.encode(record)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise SerializationError(f"Cannot write a {type(record).__name__}: {error}.") from error
        finally:
            self._frames = []
        return frames

    def _encode_other(self, value: object) -> object:
        if isinstance(value, np.ndarray):
            return self._encode_array(value)
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"objects of type {type(value).__name__} do not travel between processes")

    def _encode_array(self, array: np.ndarray[Any, Any]) -> msgspec.msgpack.Ext:
        dtype = array.dtype.str
        if dtype not in _DTYPES:
            raise TypeError(f"arrays of dtype {array.dtype} do not travel between processes")
        data: int | bytes
        if array.nbytes < INLINE_LIMIT:
            data = array.tobytes()
        else:
            data = len(self._frames)
            self._frames.append(np.ascontiguousarray(array).data.cast("B"))
        header = _ArrayHeader(dtype, array.shape, data)
        return msgspec.msgpack.Ext(ARRAY_EXTENSION, _header_encoder.encode(header))


class MsgpackDecoder(Generic[T]):
    """Reads records of one type. Not safe for use by two threads at once.

    Large arrays of the result view the received frames and cannot be written to.
    """

    def __init__(self, record_type: type[T]) -> None:
        self._name = getattr(record_type, "__name__", str(record_type))
        self._decoder = msgspec.msgpack.Decoder(
            record_type, dec_hook=_check_array, ext_hook=self._decode_extension
        )
        self._frames: Sequence[Frame] = ()

    def decode(self, frames: Sequence[Frame] | Frame) -> T:
        """The record; `SerializationError` if the frames do not hold exactly one of this type."""
        self._frames = [frames] if isinstance(frames, Frame) else frames
        try:
            if not self._frames:
                raise ValueError("no frames")
            return self._decoder.decode(self._frames[0])
        except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            raise SerializationError(f"Not a valid {self._name}: {error}.") from error
        finally:
            self._frames = ()

    def _decode_extension(self, code: int, payload: memoryview) -> np.ndarray[Any, Any]:
        if code != ARRAY_EXTENSION:
            raise ValueError(f"unknown extension type {code}")
        header = _header_decoder.decode(payload)
        if header.dtype not in _DTYPES:
            raise ValueError("unknown dtype of an array")
        data: Frame
        if isinstance(header.data, int):
            if not 0 < header.data < len(self._frames):
                raise ValueError(f"array in frame {header.data} of {len(self._frames)}")
            data = self._frames[header.data]
        else:
            data = header.data
        dtype = np.dtype(header.dtype)
        if any(n < 0 for n in header.shape):
            raise ValueError("array with a negative dimension")
        if math.prod(header.shape) * dtype.itemsize != memoryview(data).nbytes:
            raise ValueError("array whose shape does not fit its data")
        return np.frombuffer(data, dtype).reshape(header.shape)


def _check_array(wanted: Any, value: object) -> object:
    """Refuse an array whose dtype is not the annotated one."""
    dtype = _annotated_dtype(wanted)
    if not isinstance(value, np.ndarray) or (dtype is not None and value.dtype != dtype):
        raise TypeError("not an array of the declared type")
    return value


@functools.cache
def _annotated_dtype(annotation: Any) -> np.dtype[Any] | None:
    if annotation is np.ndarray:
        return None
    if typing.get_origin(annotation) is not np.ndarray:
        raise TypeError(f"fields of type {annotation} cannot be read")
    scalar = typing.get_args(typing.get_args(annotation)[1])[0]
    return np.dtype(scalar) if isinstance(scalar, type) else None
