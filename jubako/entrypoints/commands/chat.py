"""`jubako chat`: a conversation in the terminal, streamed."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, TextIO, cast

from jubako.entrypoints.commands.engine_options import add_engine_arguments, engine_config
from jubako.entrypoints.commands.sampling_options import (
    add_sampling_arguments,
    given_sampling_values,
    sampling_params,
)
from jubako.errors import UnsupportedModelError, ValidationError
from jubako.outputs import RequestOutput
from jubako.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jubako.frontend.llm_engine import LLMEngine

HELP = "/reset forgets the conversation, /quit ends, Ctrl-C stops an answer."
PROMPT = "> "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--system-prompt", metavar="TEXT", help="What the model is told first.")
    add_sampling_arguments(parser, skip=("n", "logprobs", "prompt_logprobs"))
    # The seed here is the answer's, which decides alone what is sampled.
    add_engine_arguments(parser, quiet=True, skip=("seed",))


def run(args: argparse.Namespace) -> int:
    """Talk until the user has enough."""
    given = given_sampling_values(args)
    config = engine_config(args)

    from jubako.frontend.llm_engine import LLMEngine
    from jubako.utils.logging import setup_logging

    setup_logging(config.observability_config.log_level)
    engine = LLMEngine(config, multiprocess=True)
    try:
        if engine.tokenizer.chat_template is None:
            raise UnsupportedModelError(
                "The model has no chat template, so it cannot chat; use: jubako generate"
            )
        if config.model_config.model is None and sys.stdin.isatty():
            print(
                "The default model is a base model: it continues text and was not taught to "
                "answer. Give an instruction-tuned one for that: jubako chat --model PATH",
                file=sys.stderr,
            )
        params = sampling_params(
            given, engine.config.model_config.generation_config, RequestOutputKind.DELTA, None
        )
        conversation = Conversation(engine, params, args.system_prompt)
        return Terminal(conversation, sys.stdin, sys.stdout, sys.stderr).run()
    finally:
        engine.shutdown()


class Conversation:
    """The messages so far, and the engine that answers them."""

    def __init__(
        self, engine: LLMEngine, params: SamplingParams, system_prompt: str | None
    ) -> None:
        self._engine = engine
        self._params = params
        self._system_prompt = system_prompt
        self._requests = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages: list[dict[str, str]] = []
        if self._system_prompt:
            self.messages.append({"role": "system", "content": self._system_prompt})

    def ask(self, text: str, out: TextIO) -> None:
        """Write the answer to `text` as it comes, and remember both.

        An interrupt stops the answer; what was written of it is remembered. A message that is
        refused raises `ValidationError` and is forgotten.
        """
        self.messages.append({"role": "user", "content": text})
        request_id = str(self._requests)
        self._requests += 1
        answer = ""
        try:
            tokenizer = self._engine.tokenizer
            prompt = tokenizer.apply_chat_template(self.messages, add_generation_prompt=True)
            # The template writes the start-of-sequence token itself.
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            self._engine.add_request(
                request_id, {"prompt": prompt, "prompt_token_ids": ids}, self._params
            )
        except ValidationError:
            self.messages.pop()
            raise
        try:
            finished = False
            while not finished:
                for output in cast(list[RequestOutput], self._engine.step()):
                    if output.request_id != request_id:
                        # The rest of an answer that was stopped.
                        continue
                    answer += output.outputs[0].text
                    out.write(output.outputs[0].text)
                    finished = output.finished
                out.flush()
        except KeyboardInterrupt:
            self._engine.abort_request([request_id])
        self.messages.append({"role": "assistant", "content": answer})


class Terminal:
    """Reads lines and shows answers; without a terminal, lines in and answers out."""

    def __init__(
        self, conversation: Conversation, stdin: TextIO, stdout: TextIO, stderr: TextIO
    ) -> None:
        self._conversation = conversation
        self._stdin = stdin
        self._stdout = stdout
        self._stderr = stderr
        self._interactive = stdin.isatty() and stdout.isatty()

    def run(self) -> int:
        """The loop; 0, or 1 if a message was refused and nobody was there to see it."""
        code = 0
        if self._interactive:
            # Line editing and history for input().
            import readline  # noqa: F401

            print(HELP, file=self._stderr)
        while (line := self._read()) is not None:
            line = line.strip()
            if line in ("/quit", "/exit"):
                break
            if line == "/reset":
                self._conversation.reset()
            elif line == "/help":
                print(HELP, file=self._stderr)
            elif line:
                try:
                    self._conversation.ask(line, self._stdout)
                    print(file=self._stdout, flush=True)
                except ValidationError as error:
                    code = 0 if self._interactive else 1
                    hint = (
                        " /reset forgets the conversation."
                        if error.code == "context_length_exceeded"
                        else ""
                    )
                    print(f"jubako: error: {error.message}{hint}", file=self._stderr)
        return code

    def _read(self) -> str | None:
        """The next line; None at the end of the input."""
        if not self._interactive:
            return self._stdin.readline() or None
        while True:
            try:
                return input(PROMPT)
            except KeyboardInterrupt:
                print(file=self._stdout)
            except EOFError:
                print(file=self._stdout)
                return None
