"""What does Whisper's encoder see of a recording? Its loudness by pitch and time.

As in "Robust Speech Recognition via Large-Scale Weak Supervision" (Radford et al., 2022): power of
25 ms windows every 10 ms, summed on Slaney's mel scale, as a logarithm cut 80 dB below the loudest.
"""

from __future__ import annotations

import functools

import numpy as np

from jubako.errors import ValidationError

SAMPLE_RATE = 16_000
MAX_SECONDS = 30
MAX_SAMPLES = SAMPLE_RATE * MAX_SECONDS
WINDOW = 400
HOP = 160
NUM_FRAMES = MAX_SAMPLES // HOP

_SMALLEST_POWER = 1e-10
_RANGE = 8.0
"""How far below the loudest, as a power of ten, nothing is told apart any more."""


def log_mel_features(samples: np.ndarray, num_mel_bins: int) -> np.ndarray:
    """Features float32 [num_mel_bins, 3000], contiguous, of `samples` float [n], mono at 16 kHz.

    A shorter recording is followed by silence. Raises `ValidationError` for more than 30 seconds,
    for samples that are not finite, and for another shape.
    """
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise ValidationError(
            f"samples must be floats of one channel, got {samples.dtype} {list(samples.shape)}.",
            "audio",
        )
    if len(samples) > MAX_SAMPLES:
        raise ValidationError(
            f"The recording has {len(samples)} samples; at most {MAX_SAMPLES} ({MAX_SECONDS} s at "
            f"{SAMPLE_RATE} Hz) make one input. Cut it.",
            "audio",
        )
    if not np.isfinite(samples).all():
        raise ValidationError("The recording has samples that are no finite numbers.", "audio")
    # Frames that see nothing but the silence at the end need no computing.
    heard = min(NUM_FRAMES, (len(samples) + WINDOW // 2) // HOP + 1) if len(samples) else 0
    features = np.full((num_mel_bins, NUM_FRAMES), np.log10(_SMALLEST_POWER), np.float64)
    if heard:
        power = _power(samples, heard)
        mel = _mel_filters(num_mel_bins) @ power.T
        features[:, :heard] = np.log10(np.maximum(mel, _SMALLEST_POWER))
    np.maximum(features, features.max() - _RANGE, out=features)
    return ((features + 4.0) / 4.0).astype(np.float32)


def _power(samples: np.ndarray, frames: int) -> np.ndarray:
    """Power float64 [frames, 201] of the first frames; each is centred on its sample."""
    half = WINDOW // 2
    end = (frames - 1) * HOP + half
    padded = np.zeros(half + max(end, half + 1), np.float64)
    padded[half : half + len(samples)] = samples[: len(padded) - half]
    # What lies outside of the 30 seconds mirrors what lies within.
    padded[:half] = padded[2 * half : half : -1]
    last = half + MAX_SAMPLES - 1
    beyond = len(padded) - 1 - last
    if beyond > 0:
        padded[last + 1 :] = padded[last - beyond : last][::-1]
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:frames]
    spectrum = np.fft.rfft(windows * _hann(), axis=1)
    return spectrum.real**2 + spectrum.imag**2


@functools.cache
def _hann() -> np.ndarray:
    """The periodic Hann window."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)


@functools.cache
def _mel_filters(count: int) -> np.ndarray:
    """Triangles [count, 201] between neighbours on Slaney's scale, each of area 1 in hertz."""
    frequencies = np.arange(WINDOW // 2 + 1) * SAMPLE_RATE / WINDOW
    edges = _hertz(np.linspace(0.0, _mel(SAMPLE_RATE / 2), count + 2))
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising = (frequencies - low) / (centre - low)
    falling = (high - frequencies) / (high - centre)
    return np.maximum(0.0, np.minimum(rising, falling)) * 2.0 / (high - low)


_LINEAR_TO = 1000.0
_HERTZ_A_MEL = 200.0 / 3
_LINEAR_MELS = _LINEAR_TO / _HERTZ_A_MEL
_LOG_STEP = np.log(6.4) / 27


def _mel(hertz: float) -> float:
    """Slaney's scale: linear below 1 kHz, logarithmic above (Auditory Toolbox, 1998)."""
    if hertz < _LINEAR_TO:
        return hertz / _HERTZ_A_MEL
    return float(_LINEAR_MELS + np.log(hertz / _LINEAR_TO) / _LOG_STEP)


def _hertz(mels: np.ndarray) -> np.ndarray:
    return np.where(
        mels < _LINEAR_MELS,
        mels * _HERTZ_A_MEL,
        _LINEAR_TO * np.exp((mels - _LINEAR_MELS) * _LOG_STEP),
    )
