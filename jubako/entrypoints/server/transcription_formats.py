"""How does a transcription look in each of OpenAI's formats?"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import msgspec

from jubako.multimodal.whisper.tokens import LANGUAGES
from jubako.outputs import Transcription


class DurationUsage(msgspec.Struct, kw_only=True):
    """What was used: seconds of a recording."""

    type: str = "duration"
    seconds: int


class TranscriptionResponse(msgspec.Struct, kw_only=True):
    """The format json."""

    text: str
    usage: DurationUsage


class VerboseSegment(msgspec.Struct, kw_only=True):
    """What was said from `start` to `end`, in seconds. `seek` is where its piece begins, in 10 ms.

    Whether nobody spoke is not worked out: `no_speech_prob` is null.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float | None
    compression_ratio: float
    no_speech_prob: None = None


class VerboseTranscriptionResponse(msgspec.Struct, kw_only=True):
    """The format verbose_json."""

    task: str
    language: str
    """English name of the language."""
    duration: float
    text: str
    segments: list[VerboseSegment]
    usage: DurationUsage


class TextDelta(msgspec.Struct, kw_only=True):
    """An event of a stream: what is new of the text."""

    type: str = "transcript.text.delta"
    delta: str


class TextDone(msgspec.Struct, kw_only=True):
    """The last event of a stream: the whole text."""

    type: str = "transcript.text.done"
    text: str
    usage: DurationUsage


def usage(duration: float) -> DurationUsage:
    """Seconds begun."""
    return DurationUsage(seconds=math.ceil(duration))


def as_json(result: Transcription) -> TranscriptionResponse:
    """Text alone."""
    return TranscriptionResponse(text=result.text, usage=usage(result.duration))


def as_verbose_json(
    result: Transcription, temperature: float, seeks: list[float]
) -> VerboseTranscriptionResponse:
    """Text with segments. `seeks` are the seconds at which the recording's pieces begin."""
    segments = []
    for number, segment in enumerate(result.segments):
        raw = segment.text.encode()
        begin = max((at for at in seeks if at <= segment.start), default=0.0)
        segments.append(
            VerboseSegment(
                id=number,
                seek=round(begin * 100),
                start=segment.start,
                end=segment.end,
                text=segment.text,
                tokens=segment.token_ids,
                temperature=temperature,
                avg_logprob=segment.avg_logprob,
                compression_ratio=len(raw) / len(zlib.compress(raw)),
            )
        )
    language = "en" if result.task == "translate" else result.language
    return VerboseTranscriptionResponse(
        task=result.task,
        language=LANGUAGES[language],
        duration=round(result.duration, 3),
        text=result.text,
        segments=segments,
        usage=usage(result.duration),
    )


def as_text(result: Transcription) -> str:
    """One line."""
    return result.text + "\n"


def as_srt(result: Transcription) -> str:
    """SubRip subtitles."""
    parts = [
        f"{number}\n{_clock(s.start, ',')} --> {_clock(s.end, ',')}\n{_cue(s.text)}\n\n"
        for number, s in enumerate(result.segments, start=1)
    ]
    return "".join(parts)


def as_vtt(result: Transcription) -> str:
    """WebVTT subtitles (https://www.w3.org/TR/webvtt1/)."""
    parts = [
        f"{_clock(s.start, '.')} --> {_clock(s.end, '.')}\n{_escaped(_cue(s.text))}\n\n"
        for s in result.segments
    ]
    return "WEBVTT\n\n" + "".join(parts)


TEXT_FORMATS: dict[str, tuple[Callable[[Transcription], str], str]] = {
    "text": (as_text, "text/plain"),
    "srt": (as_srt, "text/plain"),
    "vtt": (as_vtt, "text/vtt"),
}
"""Format → its writer, media type."""


def _clock(seconds: float, point: str) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{point}{thousandths:03}"


def _cue(text: str) -> str:
    # An empty line would end the cue, and an arrow begin another.
    return " ".join(text.split()).replace("-->", "->")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
