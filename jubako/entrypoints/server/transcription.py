"""How are recordings that come over HTTP transcribed?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec
from starlette.responses import Response

from jubako.entrypoints.server.exchange import StreamStyle, settle
from jubako.entrypoints.server.generation import check_model, event
from jubako.entrypoints.server.state import ServerState
from jubako.entrypoints.server.transcription_form import TranscriptionForm
from jubako.entrypoints.server.transcription_formats import (
    TEXT_FORMATS,
    TextDelta,
    TextDone,
    as_json,
    as_verbose_json,
    usage,
)
from jubako.errors import EngineGenerateError, ValidationError
from jubako.frontend.transcription import Transcriber, TranscriptionJob, TranscriptionOptions
from jubako.multimodal.audio.log_mel import SAMPLE_RATE
from jubako.outputs import RequestOutput
from jubako.sampling_params import RequestOutputKind, SamplingParams


class TranscriptionExchange:
    """One recording, which is one engine request for each of its pieces."""

    stream_style = StreamStyle()
    job: TranscriptionJob
    transcriber: Transcriber

    def __init__(
        self, state: ServerState, form: TranscriptionForm, task: str, request_id: str
    ) -> None:
        self.state = state
        self.form = form
        self.id = f"transcr-{request_id}"
        self.options = TranscriptionOptions(
            language=form.language,
            task=task,
            prompt=form.prompt,
            timestamps=form.response_format in ("srt", "vtt", "verbose_json"),
            temperature=form.temperature,
        )

    async def prepare(self) -> None:
        """Check the request and decode its recording, on a thread."""
        check_model(self.state, self.form.model)
        engine = self.state.engine
        self.transcriber = Transcriber(
            engine.config, engine.tokenizer, engine.ready.supported_tasks
        )
        size = len(self.form.file)
        # What waits for a thread is held in memory, and counts like what is being read.
        self.state.bodies.take(size)
        try:
            self.job = await asyncio.to_thread(
                self.transcriber.prepare, self.form.file, self.transcriber.plan(self.options)
            )
        except ValidationError as error:
            if error.parameter == "audio":
                error.parameter = "file"
            raise
        finally:
            self.state.bodies.give_back(size)

    def admit(self) -> Callable[[], None]:
        """Take places for all engine requests; the result gives them back."""
        tokens = sum(len(prompt["decoder_prompt"]) for prompt in self.job.prompts)
        return self.state.admission.admit(len(self.job.prompts), tokens, "file")

    # -- whole --------------------------------------------------------------------------------

    async def answer(self) -> Response:
        """The transcription in the format that was asked for."""
        tasks = [asyncio.ensure_future(self._run_one(i)) for i in range(len(self.job.prompts))]
        try:
            outputs = list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                await settle(task)
        result = self.transcriber.finish(self.job, outputs)
        kind = self.form.response_format
        if kind in TEXT_FORMATS:
            write, media_type = TEXT_FORMATS[kind]
            return Response(write(result), media_type=media_type)
        record: msgspec.Struct = as_json(result)
        if kind == "verbose_json":
            begins = [piece.start / SAMPLE_RATE for piece in self.job.pieces]
            record = as_verbose_json(result, self.form.temperature, begins)
        return Response(msgspec.json.encode(record), media_type="application/json")

    async def _run_one(self, index: int) -> RequestOutput:
        async with aclosing(self._outputs(index, self.job.params)) as outputs:
            async for output in outputs:
                if output.finished:
                    return output
        raise EngineGenerateError("The engine gave no answer to this request.")

    async def _outputs(
        self, index: int, params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        request_id = self.id if len(self.job.prompts) == 1 else f"{self.id}-{index}"
        source = self.state.engine.generate(self.job.prompts[index], params, request_id)
        async with aclosing(self.state.running(request_id, source)) as outputs:
            async for output in outputs:
                reason = output.outputs[0].finish_reason
                if reason == "abort":
                    self.state.check_accepting()
                if reason in ("abort", "error"):
                    raise EngineGenerateError("The engine could not finish this request.")
                yield output

    # -- streamed -----------------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: the text as it comes, then all of it.

        All pieces are transcribed at once; what is said of a later one waits for the earlier ones.
        """
        params = self.job.params.clone(output_kind=RequestOutputKind.DELTA)
        queues: list[asyncio.Queue[RequestOutput | BaseException]] = []
        tasks = []
        for index in range(len(self.job.prompts)):
            queues.append(asyncio.Queue())
            tasks.append(asyncio.ensure_future(self._pump(index, params, queues[-1])))
        text = ""
        try:
            for queue in queues:
                finished = False
                token_ids: list[int] = []
                told = ""
                while not finished:
                    output = await queue.get()
                    if isinstance(output, BaseException):
                        raise output
                    finished = output.finished
                    token_ids += output.outputs[0].token_ids
                    whole = self.transcriber.text(token_ids)
                    if not finished and whole.endswith("\ufffd"):
                        continue  # the rest of a character is to come
                    delta = whole[len(told) :] if text else whole[len(told) :].lstrip()
                    told = whole
                    if delta:
                        text += delta
                        yield event(TextDelta(delta=delta))
            yield event(TextDone(text=text.strip(), usage=usage(self.job.duration)))
        finally:
            for task in tasks:
                await settle(task)

    async def _pump(
        self,
        index: int,
        params: SamplingParams,
        queue: asyncio.Queue[RequestOutput | BaseException],
    ) -> None:
        try:
            async with aclosing(self._outputs(index, params)) as outputs:
                async for output in outputs:
                    queue.put_nowait(output)
        except Exception as error:
            queue.put_nowait(error)
