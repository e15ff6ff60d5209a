"""How does a file of sound become samples, and which files are refused?

Nothing is believed that a file says about itself: its kind is told by its first bytes before any
decoder sees it, and its length is counted while it is decoded, block by block.
"""

from __future__ import annotations

import io
import os
import stat
from typing import Any, BinaryIO

import numpy as np

from jubako.config.multimodal import MultiModalConfig
from jubako.errors import NotImplementedFeatureError, ValidationError
from jubako.multimodal.audio.log_mel import SAMPLE_RATE
from jubako.multimodal.audio.resample import INSTALL, MonoStream, check_shape, to_mono

Audio = str | os.PathLike[str] | bytes | tuple[np.ndarray, int]
"""A path, the bytes of a file, or samples and their rate."""

MIN_SECONDS = 0.1

FORMATS = {"WAV": ("WAV", "WAVEX"), "FLAC": ("FLAC",), "OGG": ("OGG",), "MP3": ("MP3",)}
"""What is read → the decoder's names of it."""

_NAMES = {name for names in FORMATS.values() for name in names}

_BLOCK_FRAMES = 65_536
_LARGEST_COUNT = 2**40
"""Frames above this stand for an unknown length."""
_SIGNATURE_BYTES = 16
_LOST = 0.05
"""Of a file's length, this part may be missing: headers of compressed formats estimate."""


def load_audio(audio: Audio, limits: MultiModalConfig) -> np.ndarray:
    """Samples float32 [n] of `audio`, one channel at 16 kHz.

    Raises `ValidationError` with the code `media_too_large` for what exceeds a limit,
    `media_unsupported` for another kind of file, and `media_undecodable` for one that is damaged,
    empty or shorter than 0.1 s.
    """
    if isinstance(audio, tuple):
        samples = _from_array(audio, limits)
    elif isinstance(audio, bytes | bytearray | memoryview):
        _check_size(len(audio), limits)
        samples = _decode(io.BytesIO(audio), limits)
    elif isinstance(audio, str | os.PathLike):
        with _open(audio, limits) as file:
            samples = _decode(file, limits)
    else:
        raise ValidationError(
            "A recording must be a path, the bytes of a file, or (samples, rate), got "
            f"{type(audio).__name__}.",
            "audio",
        )
    if len(samples) < MIN_SECONDS * SAMPLE_RATE:
        raise _undecodable(
            f"The recording lasts {len(samples) / SAMPLE_RATE:.3f} s; it must last at least "
            f"{MIN_SECONDS} s."
        )
    if not np.isfinite(samples).all():
        raise _undecodable("The recording has samples that are no finite numbers.")
    return samples


def _from_array(audio: tuple[Any, ...], limits: MultiModalConfig) -> np.ndarray:
    if len(audio) != 2 or not isinstance(audio[0], np.ndarray):
        raise ValidationError(
            "A recording as a tuple must be a NumPy array of samples and their rate.", "audio"
        )
    samples, rate = audio
    if isinstance(rate, bool) or not isinstance(rate, int | np.integer):
        raise ValidationError(f"The sampling rate must be an integer, got {rate!r}.", "audio")
    if rate > 0 and samples.size:
        _check_duration(max(samples.shape) / rate, limits)
    return to_mono(samples, int(rate))


def _open(path: str | os.PathLike[str], limits: MultiModalConfig) -> BinaryIO:
    """The file at `path`, which must be a regular one of at most the allowed size."""
    name = os.path.basename(os.fspath(path)) or os.fspath(path)
    try:
        # Opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no name of a file"
        raise ValidationError(f"The recording {name!r} cannot be opened: {why}.", "audio") from None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise ValidationError(f"The recording {name!r} is no regular file.", "audio")
        _check_size(about.st_size, limits)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _decode(file: BinaryIO, limits: MultiModalConfig) -> np.ndarray:
    signature = file.read(_SIGNATURE_BYTES)
    file.seek(0)
    if not signature:
        raise _undecodable("The recording is empty: it has 0 bytes.")
    kind = sniff(signature)
    soundfile = _soundfile()
    try:
        sound = soundfile.SoundFile(file)
    except (soundfile.LibsndfileError, RuntimeError):
        raise _undecodable(f"The recording begins like {kind} but cannot be read as it.") from None
    with sound:
        # A tag as of MP3 may stand before anything.
        if sound.format not in _NAMES:
            raise _unsupported("a tag and something else")
        frames, rate = sound.frames, sound.samplerate
        check_shape(rate, sound.channels)
        length_known = 0 <= frames < _LARGEST_COUNT
        if length_known:
            _check_duration(frames / rate, limits)
        stream = MonoStream(rate, sound.channels)
        blocks: list[np.ndarray] = []
        decoded = 0
        ended = False
        while not ended:
            try:
                block = sound.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)
            except (soundfile.LibsndfileError, RuntimeError):
                raise _undecodable(
                    f"The recording is damaged after {decoded / rate:.1f} s of {kind}."
                ) from None
            ended = len(block) < _BLOCK_FRAMES
            decoded += len(block)
            _check_duration(decoded / rate, limits)
            blocks.append(stream.push(block, last=ended))
    if length_known and decoded < frames * (1 - _LOST) - rate * MIN_SECONDS:
        raise _undecodable(
            f"The recording is cut short: it has {decoded / rate:.1f} s of the {frames / rate:.1f} "
            "s that it announces."
        )
    return np.concatenate(blocks)


def sniff(signature: bytes) -> str:
    """The key of `FORMATS` that a file's first 16 bytes tell; `media_unsupported` for others."""
    if signature[:4] == b"RIFF" and signature[8:12] == b"WAVE":
        return "WAV"
    if signature[:4] == b"fLaC":
        return "FLAC"
    if signature[:4] == b"OggS":
        return "OGG"
    # An MPEG frame begins with 11 bits that are 1, a version, and layer 3, which is 01.
    is_frame = len(signature) > 2 and signature[0] == 0xFF and signature[1] & 0xE6 == 0xE2
    if signature[:3] == b"ID3" or is_frame:
        return "MP3"
    raise _unsupported(_looks_like(signature))


def _looks_like(signature: bytes) -> str:
    if signature[4:8] == b"ftyp":
        return "an MP4 or M4A file"
    if signature[:4] == b"\x1a\x45\xdf\xa3":
        return "a WebM or Matroska file"
    if signature[:4] == b"FORM":
        return "an AIFF file"
    return "none of them"


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError):
        raise NotImplementedFeatureError(f"Files of sound cannot be read; {INSTALL}.") from None
    return soundfile


def _check_size(size: int, limits: MultiModalConfig) -> None:
    if size > limits.max_audio_bytes:
        raise ValidationError(
            f"The recording has {size} bytes; at most {limits.max_audio_bytes} are taken. Cut or "
            "compress it.",
            "audio",
            size,
            code="media_too_large",
        )


def _check_duration(seconds: float, limits: MultiModalConfig) -> None:
    longest = limits.max_audio_decode_duration_s
    if seconds > longest:
        raise ValidationError(
            f"The recording lasts {seconds:.1f} s or more; at most {longest:g} s are taken. Cut "
            "it.",
            "audio",
            seconds,
            code="media_too_large",
        )


def _undecodable(message: str) -> ValidationError:
    return ValidationError(message, "audio", code="media_undecodable")


def _unsupported(what: str) -> ValidationError:
    return ValidationError(
        f"The recording must be {', '.join(FORMATS)}; this is {what}. Convert it.",
        "audio",
        code="media_unsupported",
    )
