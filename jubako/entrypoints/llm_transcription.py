"""How does a Python program get what was said in a recording?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

from jubako.outputs import RequestOutput, Transcription
from jubako.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jubako.frontend.llm_engine import LLMEngine
    from jubako.frontend.transcription import Transcriber
    from jubako.multimodal.audio.decode import Audio

Progress = bool | Callable[..., Any]


class TranscriptionMethods:
    """What `LLM` offers for models that hear."""

    llm_engine: LLMEngine
    _transcriber: Transcriber | None = None

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
    ) -> list[RequestOutput]:
        """Run one request for each prompt; in `LLM`."""
        raise NotImplementedError

    @overload
    def transcribe(
        self,
        audio: Audio,
        *,
        language: str | None = None,
        task: str = "transcribe",
        prompt: str | None = None,
        timestamps: bool = False,
        temperature: float = 0.0,
        use_tqdm: Progress = True,
    ) -> Transcription: ...

    @overload
    def transcribe(
        self,
        audio: list[Audio],
        *,
        language: str | None = None,
        task: str = "transcribe",
        prompt: str | None = None,
        timestamps: bool = False,
        temperature: float = 0.0,
        use_tqdm: Progress = True,
    ) -> list[Transcription]: ...

    def transcribe(
        self,
        audio: Audio | list[Audio],
        *,
        language: str | None = None,
        task: str = "transcribe",
        prompt: str | None = None,
        timestamps: bool = False,
        temperature: float = 0.0,
        use_tqdm: Progress = True,
    ) -> Transcription | list[Transcription]:
        """What is said in a recording; for a list of them, a list.

        `audio` is a path, the bytes of a WAV, FLAC, OGG or MP3 file, or `(samples, rate)`: a NumPy
        array [n], [channels, n] or [n, channels]. `language` is the spoken one, by code or English
        name; without it English is taken, with a warning. `task="translate"` gives English.
        `prompt` is text that comes before the recording, whose spelling is continued. With
        `timestamps` the segments are as the model hears them, else one for each piece of at most
        30 seconds. All recordings are accepted or none: a bad one raises `ValidationError`.
        """
        from jubako.frontend.transcription import TranscriptionOptions

        transcriber = self._get_transcriber()
        plan = transcriber.plan(
            TranscriptionOptions(language, task, prompt, timestamps, temperature)
        )
        recordings = audio if isinstance(audio, list) else [audio]
        jobs = [transcriber.prepare(recording, plan) for recording in recordings]
        outputs = self.generate(
            [prompt for job in jobs for prompt in job.prompts],
            [plan.params for job in jobs for _ in job.prompts],
            use_tqdm,
        )
        results, taken = [], 0
        for job in jobs:
            count = len(job.prompts)
            results.append(transcriber.finish(job, outputs[taken : taken + count]))
            taken += count
        return results if isinstance(audio, list) else results[0]

    def _get_transcriber(self) -> Transcriber:
        if self._transcriber is None:
            from jubako.frontend.transcription import Transcriber

            engine = self.llm_engine
            self._transcriber = Transcriber(
                engine.config, engine.tokenizer, engine.ready.supported_tasks
            )
        return self._transcriber
