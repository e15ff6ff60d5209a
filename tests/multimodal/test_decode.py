"""Which recordings are taken, what becomes of them, and what is said of the others."""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from jubako.config import MultiModalConfig
from jubako.errors import ERROR_TABLE, ValidationError
from jubako.multimodal.audio import decode
from jubako.multimodal.audio.decode import load_audio
from jubako.multimodal.audio.resample import to_mono

RECORDINGS = Path(__file__).parent / "recordings"
LIMITS = MultiModalConfig()
RATE = 16_000


def tone(rate: int, seconds: float, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)).astype(
        np.float32
    )


def encoded(samples: np.ndarray, rate: int, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, **options)
    return file.getvalue()


def refused(audio: Any, code: str, *told: str, limits: MultiModalConfig = LIMITS) -> None:
    with pytest.raises(ValidationError) as caught:
        load_audio(audio, limits)
    assert caught.value.code == code
    assert caught.value.parameter == "audio"
    for words in told:
        assert words in caught.value.message


# -- what is taken ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["museum.wav", "window.ogg", "morgen.flac"])
def test_path_and_bytes_give_the_same(name: str) -> None:
    path = RECORDINGS / name
    samples = load_audio(path, LIMITS)
    assert samples.dtype == np.float32
    assert samples.ndim == 1
    assert 1.5 < len(samples) / RATE < 5
    for same in (str(path), path.read_bytes(), memoryview(path.read_bytes())):
        assert np.array_equal(load_audio(same, LIMITS), samples)


@pytest.mark.parametrize("kind", ["WAV", "WAVEX", "FLAC", "OGG", "MP3"])
@pytest.mark.parametrize("rate", [8_000, 44_100])
def test_every_kind_of_file_at_other_rates(kind: str, rate: int) -> None:
    samples = load_audio(encoded(tone(rate, 1.0), rate, kind), LIMITS)
    assert abs(len(samples) - RATE) < (2000 if kind == "MP3" else 3)
    middle = samples[4000:12000]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert abs(spectrum.argmax() * RATE / len(middle) - 440) < 3
    assert abs(np.abs(middle).max() - 0.5) < 0.05


def test_resampling_lets_nothing_through_that_the_new_rate_cannot_hold() -> None:
    samples = load_audio((tone(48_000, 1.0, hertz=12_000), 48_000), LIMITS)
    assert np.abs(samples[1000:-1000]).max() < 1e-3


def test_blocks_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(np.stack([tone(44_100, 2.0), tone(44_100, 2.0, 600)], axis=1), 44_100, "FLAC")
    whole = load_audio(data, LIMITS)
    monkeypatch.setattr(decode, "_BLOCK_FRAMES", 1000)
    assert np.abs(load_audio(data, LIMITS) - whole).max() < 1e-6


def test_channels_become_their_mean_whichever_side_they_are() -> None:
    left, right = tone(RATE, 0.5), tone(RATE, 0.5, 600)
    wanted = (left + right) / 2
    for array in (np.stack([left, right]), np.stack([left, right], axis=1)):
        assert np.allclose(load_audio((array, RATE), LIMITS), wanted, atol=1e-7)
    data = encoded(np.stack([left, right], axis=1), RATE, "WAV", subtype="FLOAT")
    assert np.allclose(load_audio(data, LIMITS), wanted, atol=1e-7)


def test_integers_are_scaled_by_their_range() -> None:
    array = np.array([-32768, 0, 16384], np.int16)
    assert to_mono(array, RATE).tolist() == [-1.0, 0.0, 0.5]
    samples = tone(RATE, 0.5)
    assert np.abs(
        load_audio(((samples * 32768).astype(np.int16), RATE), LIMITS) - samples
    ).max() < (1e-4)


# -- too large --------------------------------------------------------------------------------


def test_too_many_bytes() -> None:
    limits = MultiModalConfig(max_audio_bytes=1000)
    data = encoded(tone(RATE, 1.0), RATE, "WAV")
    refused(data, "media_too_large", str(len(data)), "1000", limits=limits)


def test_too_many_bytes_in_a_file_that_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.wav"
    with open(path, "wb") as file:
        file.truncate(40 * 1024 * 1024)
    refused(path, "media_too_large", str(40 * 1024 * 1024), str(25 * 1024 * 1024))


def test_too_long_by_its_header_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = encoded(np.zeros(RATE * 90, np.float32), RATE, "FLAC")
    monkeypatch.setattr(soundfile.SoundFile, "read", None)
    limits = MultiModalConfig(max_audio_decode_duration_s=60)
    refused(data, "media_too_large", "90.0 s", "60 s", limits=limits)


def with_length(flac: bytes, frames: int) -> bytes:
    """`flac` with another count of frames in its header, which has 36 bits from bit 172 on."""
    assert flac[:4] == b"fLaC"
    start = 8 + 13
    head = int.from_bytes(flac[start : start + 5], "big")
    head = (head >> 36 << 36) | frames
    return flac[:start] + head.to_bytes(5, "big") + flac[start + 5 :]


@pytest.mark.parametrize("announced", [0, 100 * RATE])
def test_a_bomb_that_lies_about_its_length_stops_at_the_limit(
    announced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = with_length(encoded(np.zeros(RATE * 1200, np.float32), RATE, "FLAC"), announced)
    assert len(bomb) < 200_000
    read = soundfile.SoundFile.read
    decoded = 0

    def counting(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal decoded
        block = read(self, *args, **options)
        decoded += len(block)
        return block

    monkeypatch.setattr(soundfile.SoundFile, "read", counting)
    limits = MultiModalConfig(max_audio_decode_duration_s=60)
    code = "media_too_large"
    if announced:
        refused(bomb, code, "100.0 s", "60 s", limits=limits)
        assert decoded == 0
    else:
        refused(bomb, code, "60 s", limits=limits)
        assert decoded <= 60 * RATE + decode._BLOCK_FRAMES


def test_too_many_channels_and_rates_out_of_bounds() -> None:
    nine = encoded(np.zeros((RATE, 9), np.float32), RATE, "WAV")
    refused(nine, "media_too_large", "9 channels", "1 to 8")
    refused((np.zeros((9, RATE), np.float32), RATE), "media_too_large", "9 channels")
    refused((np.zeros(RATE, np.float32), 200_000), "media_too_large", "200000", "192000")
    refused(encoded(np.zeros(RATE, np.float32), 2000, "WAV"), "media_undecodable", "2000", "4000")


def test_an_array_that_is_too_long() -> None:
    limits = MultiModalConfig(max_audio_decode_duration_s=2)
    refused((np.zeros((2, 3 * RATE), np.float32), RATE), "media_too_large", "3.0 s", limits=limits)


# -- not sound --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"<html>not sound</html>", "none of them"),
        (b"\x00\x00\x00\x20ftypM4A \x00\x00\x00\x00", "M4A"),
        (b"\x1a\x45\xdf\xa3" + bytes(40), "WebM"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "none of them"),
        (b"x", "none of them"),
    ],
)
def test_other_files_are_not_given_to_a_decoder(
    data: bytes, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_soundfile", None)
    refused(data, "media_unsupported", told, "WAV, FLAC, OGG, MP3")


def test_kinds_that_the_library_knows_and_we_do_not_ask_for() -> None:
    for kind in ("AIFF", "AU", "CAF", "W64", "VOC"):
        refused(encoded(tone(RATE, 0.5), RATE, kind), "media_unsupported")


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_a_beginning_alone_is_undecodable(kind: str) -> None:
    data = encoded(tone(RATE, 0.5), RATE, kind)
    refused(data[:20] + bytes(200), "media_undecodable")


def test_a_file_that_is_cut_short() -> None:
    data = encoded(np.random.default_rng(0).uniform(-0.5, 0.5, 2 * RATE), RATE, "FLAC")
    refused(data[: len(data) // 2], "media_undecodable")


def test_a_file_that_announces_more_than_it_has() -> None:
    data = encoded(np.random.default_rng(0).uniform(-0.5, 0.5, 10 * RATE), RATE, "MP3")
    refused(data[: len(data) // 3], "media_undecodable", "cut short", "s of the 10.")


def test_what_stands_behind_a_tag_is_looked_at() -> None:
    tag = b"ID3\x04\x00\x00\x00\x00\x00\x0a" + bytes(10)
    for kind in ("AIFF", "AU"):
        refused(tag + encoded(tone(RATE, 0.5), RATE, kind), "media_unsupported")
    assert len(load_audio(tag + encoded(tone(RATE, 0.5), RATE, "FLAC"), LIMITS)) == RATE // 2


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_damaged_files_never_raise_anything_else(kind: str) -> None:
    data = bytearray(encoded(tone(22_050, 0.3), 22_050, kind))
    random = np.random.default_rng(1)
    for _ in range(60):
        damaged = bytearray(data)
        for place in random.integers(0, len(data), 8):
            damaged[place] = random.integers(256)
        end = int(random.integers(1, len(data) + 1))
        codes = []
        try:
            load_audio(bytes(damaged[:end]), MultiModalConfig(max_audio_decode_duration_s=30))
        except ValidationError as error:
            codes.append(error.code)
        assert all(code.startswith("media_") for code in codes)


def test_empty_short_and_broken_samples() -> None:
    refused(b"", "media_undecodable", "0 bytes")
    refused(encoded(np.zeros(0, np.float32), RATE, "WAV"), "media_undecodable", "0.000 s", "0.1 s")
    refused(encoded(tone(RATE, 0.05), RATE, "WAV"), "media_undecodable", "0.050 s", "0.1 s")
    refused((np.zeros(0, np.float32), RATE), "media_undecodable", "0.000 s")
    bad = tone(RATE, 0.5)
    bad[77] = np.inf
    refused((bad, RATE), "media_undecodable", "finite")
    refused(encoded(bad, RATE, "WAV", subtype="FLOAT"), "media_undecodable", "finite")


@pytest.mark.parametrize(
    ("audio", "told"),
    [
        (None, "NoneType"),
        (([0.0] * 2000, RATE), "NumPy array"),
        ((np.zeros(2000),), "NumPy array"),
        ((np.zeros(2000), 16_000.5), "rate must be an integer"),
        ((np.zeros(2000), True), "rate must be an integer"),
        ((np.zeros(2000, np.uint8), RATE), "uint8"),
        ((np.zeros((2, 2, 2000)), RATE), "3"),
        ("/no/such/file.wav", "'file.wav' cannot be opened"),
        ("nul\0.wav", "cannot be opened"),
        (".", "regular"),
        (os.devnull, "regular"),
    ],
)
def test_what_is_no_recording(audio: Any, told: str) -> None:
    refused(audio, "invalid_value", told)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "invalid_value", "regular")


def test_a_wav_of_unknown_length_is_read_to_its_end() -> None:
    data = bytearray(encoded(tone(RATE, 1.0), RATE, "WAV"))
    data[4:8] = data[40:44] = struct.pack("<I", 0xFFFFFFFF)
    assert bytes(data[36:40]) == b"data"
    assert abs(len(load_audio(bytes(data), LIMITS)) - RATE) < 3


def test_http_knows_the_codes() -> None:
    wanted = {"media_too_large": 413, "media_unsupported": 415, "media_undecodable": 422}
    assert {code: ERROR_TABLE[code].status for code in wanted} == wanted
