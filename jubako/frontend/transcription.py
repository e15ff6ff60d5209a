"""How does a recording become requests to a speech model, and their answers a transcription?"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jubako.config import JubakoConfig
from jubako.errors import CheckpointError, EngineGenerateError, ValidationError
from jubako.multimodal.audio.cutting import Piece, cut
from jubako.multimodal.audio.decode import Audio, load_audio
from jubako.multimodal.audio.log_mel import NUM_FRAMES, SAMPLE_RATE, log_mel_features
from jubako.multimodal.whisper.prompt import decoder_prompt
from jubako.multimodal.whisper.segments import TimedTokens, split_segments
from jubako.multimodal.whisper.tokens import MULTILINGUAL_VOCABULARY, WhisperTokens
from jubako.outputs import RequestOutput, Transcription, TranscriptionSegment
from jubako.sampling_params import RequestOutputKind, SamplingParams, TranscriptionRules

if TYPE_CHECKING:
    from jubako.frontend.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TASK = "transcription"
"""What a speech model's `supported_tasks` has."""

DEFAULT_LANGUAGE = "en"


@dataclass(frozen=True)
class TranscriptionOptions:
    """What is wanted of a recording.

    `prompt` is text that comes before it, whose spelling and style the model continues.
    """

    language: str | None = None
    """A code or an English name; None is English."""
    task: str = "transcribe"
    prompt: str | None = None
    timestamps: bool = False
    temperature: float = 0.0


@dataclass(frozen=True)
class TranscriptionPlan:
    """Options as the model knows them: what its decoder reads, and how it goes on."""

    prompt_ids: list[int]
    params: SamplingParams
    language: str
    """Its code."""
    options: TranscriptionOptions


@dataclass(frozen=True)
class TranscriptionJob:
    """One recording on its way: a prompt for each of its pieces."""

    prompts: list[dict[str, Any]]
    pieces: list[Piece]
    plan: TranscriptionPlan

    @property
    def params(self) -> SamplingParams:
        """Of every piece."""
        return self.plan.params

    @property
    def duration(self) -> float:
        """Seconds of the recording."""
        return self.pieces[-1].end / SAMPLE_RATE


class Transcriber:
    """Makes jobs of recordings for one model. Thread-safe.

    Raises `ValidationError` with the code `unsupported_task` for a model that hears nothing.
    """

    def __init__(
        self, config: JubakoConfig, tokenizer: Tokenizer, supported_tasks: Sequence[str]
    ) -> None:
        if TASK not in supported_tasks:
            raise ValidationError(
                f"This model hears nothing; it supports {', '.join(supported_tasks)}.",
                "model",
                code="unsupported_task",
            )
        self._limits = config.multimodal_config
        self._encoder = config.encoder_config
        self._longest = config.model_config.hf_config.get("max_target_positions", 448)
        self._generation = config.model_config.generation_config
        self._tokenizer = tokenizer
        multilingual = self._generation.get(
            "is_multilingual", config.model_config.vocab_size >= MULTILINGUAL_VOCABULARY
        )
        self._tokens = WhisperTokens.of(tokenizer.backend.token_to_id, bool(multilingual))
        if self._encoder.num_frames != NUM_FRAMES:
            raise CheckpointError(
                f"The model hears {self._encoder.num_frames} frames at once; recordings are cut "
                f"for {NUM_FRAMES}."
            )

    def prepare(self, audio: Audio, plan: TranscriptionPlan) -> TranscriptionJob:
        """Decode a recording, cut it and make what the encoder hears of it; takes a while.

        Raises `ValidationError` for what `load_audio` refuses.
        """
        samples = load_audio(audio, self._limits)
        pieces = cut(samples)
        mels = self._encoder.num_mel_bins
        prompts = [
            {
                "encoder_prompt": {
                    "input_features": log_mel_features(samples[piece.start : piece.end], mels)
                },
                "decoder_prompt": plan.prompt_ids,
            }
            for piece in pieces
        ]
        return TranscriptionJob(prompts, pieces, plan)

    def plan(self, options: TranscriptionOptions) -> TranscriptionPlan:
        """What is the same for all recordings with these options.

        Raises `ValidationError` for options that the model does not know.
        """
        language = options.language
        if language is None:
            language = DEFAULT_LANGUAGE
            logger.warning("No language was given for a recording; it is taken to be English.")
        elif not isinstance(language, str):
            raise ValidationError(f"language must be text, got {language!r}.", "language")
        if not isinstance(options.prompt, str | None):
            raise ValidationError("prompt must be text.", "prompt")
        language = self._tokens.language(language)
        previous: list[int] = []
        if options.prompt and options.prompt.strip():
            text = " " + options.prompt.strip()
            previous = self._tokenizer.encode(text, add_special_tokens=False)
        ids = decoder_prompt(
            self._tokens,
            language=language,
            task=options.task,
            timestamps=options.timestamps,
            previous=previous,
            max_target_positions=self._longest,
        )
        params = SamplingParams(
            temperature=options.temperature,
            max_tokens=None,
            detokenize=False,
            logprobs=0 if options.timestamps else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
            transcription=self._rules(options.timestamps),
        )
        return TranscriptionPlan(ids, params, language, options)

    def _rules(self, timestamps: bool) -> TranscriptionRules:
        return TranscriptionRules(
            end_token_id=self._tokens.end,
            suppress_tokens=self._listed("suppress_tokens"),
            begin_suppress_tokens=self._listed("begin_suppress_tokens"),
            first_timestamp=self._tokens.first_timestamp if timestamps else None,
        )

    def _listed(self, name: str) -> list[int]:
        return list(self._generation.get(name) or [])

    def finish(self, job: TranscriptionJob, outputs: Sequence[RequestOutput]) -> Transcription:
        """The transcription that the answers to `job.prompts`, in their order, make.

        Raises `EngineGenerateError` if one of them failed.
        """
        text = ""
        segments: list[TranscriptionSegment] = []
        for piece, output in zip(job.pieces, outputs, strict=True):
            answer = output.outputs[0]
            if answer.finish_reason not in ("stop", "length"):
                raise EngineGenerateError("The engine could not finish a piece of the recording.")
            text += self.text(answer.token_ids)
            segments += self._segments(job, piece, output)
        return Transcription(
            text=text.strip(),
            language=job.plan.language,
            task=job.plan.options.task,
            duration=job.duration,
            segments=segments,
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, or of a part of one, without times."""
        return self._tokenizer.decode([token for token in token_ids if token < self._tokens.end])

    def _segments(
        self, job: TranscriptionJob, piece: Piece, output: RequestOutput
    ) -> list[TranscriptionSegment]:
        answer = output.outputs[0]
        begin, end = (round(at / SAMPLE_RATE, 3) for at in piece)
        if job.plan.options.timestamps:
            found = split_segments(answer.token_ids, self._tokens, begin, end)
        else:
            text_ids = [token for token in answer.token_ids if token < self._tokens.end]
            found = [TimedTokens(begin, end, 0, text_ids)] if text_ids else []
        segments = []
        for start, stop, first, token_ids in found:
            average = None
            if answer.logprobs:
                chosen = answer.logprobs[first : first + len(token_ids)]
                average = sum(next(iter(p.values())).logprob for p in chosen) / len(chosen)
            segments.append(
                TranscriptionSegment(
                    start=round(start, 3),
                    end=round(stop, 3),
                    text=self._tokenizer.decode(token_ids).strip(),
                    token_ids=token_ids,
                    avg_logprob=average,
                )
            )
        return segments
