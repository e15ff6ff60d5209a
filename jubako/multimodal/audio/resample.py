"""How does a recording of any rate and channels become one channel at 16 kHz?"""

from __future__ import annotations

from typing import Any

import numpy as np

from jubako.errors import NotImplementedFeatureError, ValidationError
from jubako.multimodal.audio.log_mel import SAMPLE_RATE

MAX_CHANNELS = 8
MIN_RATE, MAX_RATE = 4_000, 192_000

INSTALL = "install the extra: pip install 'jubako[audio]'"


class MonoStream:
    """Takes blocks of frames and gives blocks of one channel at 16 kHz.

    Channels become their mean; the resampling is band-limited (soxr's HQ). Raises
    `ValidationError` for a rate or a number of channels outside of the limits.
    """

    def __init__(self, rate: int, channels: int) -> None:
        check_shape(rate, channels)
        self._resampler: Any = None
        if rate != SAMPLE_RATE:
            try:
                import soxr
            except ImportError:
                raise NotImplementedFeatureError(
                    f"Recordings at {rate} Hz need resampling to {SAMPLE_RATE} Hz; {INSTALL}."
                ) from None
            self._resampler = soxr.ResampleStream(rate, SAMPLE_RATE, 1, "float32", "HQ")

    def push(self, frames: np.ndarray, last: bool = False) -> np.ndarray:
        """The samples float32 [m] that follow from frames float [n, channels].

        With `last` those that were held back come too. A clip pushed in pieces gives the same.
        """
        mono = frames.mean(axis=1, dtype=np.float32) if frames.shape[1] > 1 else frames[:, 0]
        mono = np.ascontiguousarray(mono, np.float32)
        if self._resampler is None:
            return mono
        resampled: np.ndarray = self._resampler.resample_chunk(mono, last=last)
        return resampled


def check_shape(rate: int, channels: int) -> None:
    """Raise `ValidationError` unless a recording of that rate and channels is taken."""
    if not 1 <= channels <= MAX_CHANNELS:
        raise ValidationError(
            f"The recording has {channels} channels; 1 to {MAX_CHANNELS} are taken. Mix it down.",
            "audio",
            channels,
            code="media_too_large" if channels > MAX_CHANNELS else "media_undecodable",
        )
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ValidationError(
            f"The recording has {rate} samples a second; {MIN_RATE} to {MAX_RATE} are taken. "
            "Resample it.",
            "audio",
            rate,
            code="media_too_large" if rate > MAX_RATE else "media_undecodable",
        )


def to_mono(samples: np.ndarray, rate: int) -> np.ndarray:
    """`samples` as float32 [n] at 16 kHz.

    They are [n], [channels, n] or [n, channels], of which the shorter side is the channels: floats
    around -1 to 1, or signed integers of their type's range. Raises `ValidationError` for others.
    """
    if samples.dtype.kind not in "fi" or samples.ndim not in (1, 2):
        raise ValidationError(
            "A recording must be an array of floats or signed integers with one or two "
            f"dimensions, got {samples.dtype} with {samples.ndim}.",
            "audio",
        )
    frames = samples if samples.ndim == 2 else samples[:, None]
    if samples.ndim == 2 and frames.shape[0] < frames.shape[1]:
        frames = frames.T
    stream = MonoStream(rate, frames.shape[1])
    if frames.dtype.kind == "i":
        frames = frames.astype(np.float32) / np.float32(2 ** (8 * samples.dtype.itemsize - 1))
    return stream.push(frames, last=True)
