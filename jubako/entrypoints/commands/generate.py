"""`jubako generate`: continue texts, streaming them, or as one JSON object a line."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TextIO, cast

from jubako.entrypoints.commands.engine_options import add_engine_arguments, engine_config
from jubako.entrypoints.commands.sampling_options import (
    add_sampling_arguments,
    given_sampling_values,
    sampling_params,
)
from jubako.errors import ConfigError, ValidationError
from jubako.outputs import CompletionOutput, PositionLogprobs, RequestOutput, RequestStateStats
from jubako.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jubako.frontend.llm_engine import LLMEngine

DEFAULT_MAX_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "prompt",
        nargs="*",
        metavar="PROMPT",
        help="Text to continue. Without one, or for '-', standard input has a prompt a line; blank "
        "lines are skipped.",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="Print one JSON object a line for every answer, which also tells several apart.",
    )
    add_sampling_arguments(parser)
    # The seed here is the answer's, which decides alone what is sampled.
    add_engine_arguments(parser, quiet=True, skip=("seed",))


def run(args: argparse.Namespace) -> int:
    """Generate and print; 1 if a prompt was refused."""
    began = time.perf_counter()
    given = given_sampling_values(args)
    if not args.json and given.keys() & {"logprobs", "prompt_logprobs"}:
        raise ConfigError("--logprobs and --prompt-logprobs need --json.", "logprobs")
    config = engine_config(args)
    prompts = read_prompts(args.prompt, sys.stdin)

    from jubako.frontend.llm_engine import LLMEngine
    from jubako.utils.logging import setup_logging

    setup_logging(config.observability_config.log_level)
    engine = LLMEngine(config, multiprocess=True)
    try:
        kind = RequestOutputKind.FINAL_ONLY if args.json else RequestOutputKind.DELTA
        params = sampling_params(
            given, engine.config.model_config.generation_config, kind, DEFAULT_MAX_TOKENS
        )
        loaded = time.perf_counter() - began
        writer = JsonWriter(sys.stdout) if args.json else TextWriter(sys.stdout, sys.stderr, loaded)
        return _generate(engine, prompts, params, writer)
    finally:
        engine.shutdown()


def read_prompts(arguments: list[str], stdin: TextIO) -> list[str]:
    """The prompts on the command line, with '-' standing for the lines of standard input."""
    prompts: list[str] = []
    if not arguments and not stdin.isatty():
        arguments = ["-"]
    for argument in arguments:
        if argument == "-":
            lines = (line.rstrip("\r\n") for line in stdin)
            prompts += [line for line in lines if line.strip()]
        else:
            prompts.append(argument)
    if not prompts:
        raise ConfigError(
            "No prompt. Write one behind the command, or one a line on standard input.", "prompt"
        )
    return prompts


def _generate(
    engine: LLMEngine, prompts: list[str], params: SamplingParams, writer: JsonWriter | TextWriter
) -> int:
    code = 0
    writer.start(len(prompts), params.n)
    open_requests = 0
    for i, prompt in enumerate(prompts):
        try:
            engine.add_request(str(i), prompt, params)
            open_requests += 1
        except ValidationError as error:
            # One bad prompt is no reason to leave the others unanswered.
            code = 1
            writer.refuse(i, prompt, error)
    while open_requests:
        for output in cast(list[RequestOutput], engine.step()):
            open_requests -= output.finished
            writer.add(int(output.request_id), output)
    writer.end()
    return code


class TextWriter:
    """Writes the text of answers in order, each as it comes once those before it are complete.

    `loaded` is how many seconds the model took to load.
    """

    def __init__(self, out: TextIO, log: TextIO, loaded: float) -> None:
        self._out = out
        self._log = log
        self._loaded = loaded
        self._began = time.perf_counter()
        self._first_token: float | None = None
        self._tokens = 0
        self._n = 1
        self._buffered: dict[tuple[int, int], str] = defaultdict(str)
        self._finished: set[tuple[int, int]] = set()
        self._order: list[tuple[int, int]] = []

    def start(self, prompts: int, n: int) -> None:
        """What will come: `n` answers to each of `prompts`."""
        self._n = n
        self._order = [(i, j) for i in reversed(range(prompts)) for j in reversed(range(n))]

    def refuse(self, index: int, prompt: str, error: ValidationError) -> None:
        """A prompt that is not answered."""
        print(f"jubako: error: prompt {index + 1}: {error.message}", file=self._log)
        self._order = [key for key in self._order if key[0] != index]

    def add(self, index: int, output: RequestOutput) -> None:
        """Something new."""
        for completion in output.outputs:
            key = (index, completion.index)
            if completion.token_ids and self._first_token is None:
                self._first_token = time.perf_counter()
            self._tokens += len(completion.token_ids)
            self._buffered[key] += completion.text
            if completion.finish_reason is not None:
                self._finished.add(key)
                if completion.finish_reason not in ("stop", "length"):
                    print(
                        f"jubako: error: prompt {index + 1} ended early: "
                        f"{completion.finish_reason}",
                        file=self._log,
                    )
        self._write()

    def _write(self) -> None:
        while self._order:
            key = self._order[-1]
            self._out.write(self._buffered.pop(key, ""))
            if key not in self._finished:
                break
            self._out.write("\n")
            self._order.pop()
        self._out.flush()

    def end(self) -> None:
        """Say how fast it was."""
        if self._first_token is None:
            return
        now = time.perf_counter()
        # The first token of a single answer belongs to the prompt; its rate is that of the rest.
        single = len(self._finished) == 1
        tokens = self._tokens - 1 if single and self._tokens > 1 else self._tokens
        rate = tokens / max(now - self._first_token, 1e-9)
        print(
            f"loaded in {self._loaded:.2f} s, first token {self._first_token - self._began:.2f} s "
            f"later, {self._tokens} tokens at {rate:.1f} tokens/s",
            file=self._log,
        )


class JsonWriter:
    """Writes one JSON object a line for every answer, in the order of the prompts."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lines: dict[int, list[str]] = {}
        self._next = 0

    def start(self, prompts: int, n: int) -> None:
        """What will come; every object stands for itself."""

    def refuse(self, index: int, prompt: str, error: ValidationError) -> None:
        """A prompt that is not answered: its line has an error instead."""
        fault = {"message": error.message, "param": error.parameter, "code": error.code}
        self._put(index, [{"prompt_index": index, "prompt": prompt, "error": fault}])

    def add(self, index: int, output: RequestOutput) -> None:
        """A finished request."""
        if output.finished:
            records = [_record(index, output, answer) for answer in output.outputs]
            self._put(index, records)

    def _put(self, index: int, records: list[dict[str, Any]]) -> None:
        # What the terminal cannot show must be escaped as JSON does it.
        encoding = (getattr(self._out, "encoding", None) or "utf-8").lower()
        escape = encoding.replace("-", "") != "utf8"
        self._lines[index] = [json.dumps(record, ensure_ascii=escape) for record in records]
        while self._next in self._lines:
            for line in self._lines.pop(self._next):
                print(line, file=self._out)
            self._next += 1
        self._out.flush()

    def end(self) -> None:
        """Everything is written already."""


def _record(index: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "prompt_index": index,
        "index": answer.index,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": answer.token_ids,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "num_cached_tokens": output.num_cached_tokens,
        "timings": _timings(output.metrics),
    }
    if answer.logprobs is not None:
        record["cumulative_logprob"] = answer.cumulative_logprob
        record["logprobs"] = [_position(position) for position in answer.logprobs]
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [
            None if position is None else _position(position) for position in output.prompt_logprobs
        ]
    return record


def _position(position: PositionLogprobs) -> list[dict[str, Any]]:
    return [
        {
            "token_id": token,
            # JSON has no infinity.
            "logprob": max(entry.logprob, -9999.0),
            "rank": entry.rank,
            "token": entry.decoded_token,
        }
        for token, entry in position.items()
    ]


def _timings(stats: RequestStateStats | None) -> dict[str, float] | None:
    """Seconds by stage, and tokens a second after the first token; None without statistics."""
    if stats is None:
        return None
    decode = stats.last_token_ts - stats.first_token_ts
    tokens = stats.num_generation_tokens
    return {
        "time_to_first_token": round(stats.first_token_latency, 6),
        "queue": round(stats.scheduled_ts - stats.queued_ts, 6),
        "prefill": round(stats.first_token_ts - stats.scheduled_ts, 6),
        "decode": round(decode, 6),
        "tokens_per_second": round((tokens - 1) / decode, 3) if decode > 0 else 0.0,
    }
