"""Whisper's features: equal to transformers' extractor, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from jubako.errors import ValidationError
from jubako.multimodal.audio.log_mel import MAX_SAMPLES, log_mel_features

LENGTHS = [1, 199, 200, 201, 400, 16_001, 47_999, 479_800, 479_801, MAX_SAMPLES - 1, MAX_SAMPLES]


def sweep(length: int) -> np.ndarray:
    """Noise and a rising tone, loud at first: about all that a power of ten may be."""
    time = np.arange(length) / 16_000
    noise = np.random.default_rng(length).standard_normal(length)
    loudness = np.linspace(1, 0, length) ** 3
    return ((noise * 0.1 + np.sin(2000 * time * (1 + time))) * loudness).astype(np.float32)


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("length", LENGTHS)
def test_features_are_those_of_transformers(mels: int, length: int) -> None:
    extractor = WhisperFeatureExtractor(feature_size=mels)
    samples = sweep(length)
    wanted = extractor(samples, sampling_rate=16_000, return_tensors="np")["input_features"][0]
    features = log_mel_features(samples, mels)
    assert features.shape == (mels, 3000)
    assert features.dtype == np.float32
    assert features.flags.c_contiguous
    assert np.abs(features - wanted).max() < 1e-4


@pytest.mark.parametrize("length", [MAX_SAMPLES - 160, MAX_SAMPLES])
def test_the_end_is_mirrored_as_transformers_does_it(length: int) -> None:
    samples = sweep(MAX_SAMPLES)[:length][::-1].copy()  # loud at the end
    extractor = WhisperFeatureExtractor(feature_size=80)
    wanted = extractor(samples, sampling_rate=16_000, return_tensors="np")["input_features"][0]
    assert np.abs(log_mel_features(samples, 80) - wanted).max() < 1e-4


def test_silence_is_even() -> None:
    for samples in (np.zeros(0, np.float32), np.zeros(5000, np.float32)):
        assert (log_mel_features(samples, 80) == -1.5).all()


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        (np.zeros(MAX_SAMPLES + 1, np.float32), "480001 samples; at most 480000"),
        (np.zeros((2, 100), np.float32), "one channel"),
        (np.zeros(100, np.int16), "int16"),
        (np.array([0.0, np.nan]), "finite"),
    ],
)
def test_what_is_no_input_is_refused(samples: np.ndarray, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        log_mel_features(samples, 80)
