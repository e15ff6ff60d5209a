"""How does a Python program use a model, and generate text with it?"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from jubako.config import JubakoConfig
from jubako.entrypoints.default_sampling import default_sampling_values
from jubako.entrypoints.llm_pooling import PoolingMethods
from jubako.entrypoints.llm_transcription import TranscriptionMethods
from jubako.errors import EngineDeadError, JubakoError, ValidationError
from jubako.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from jubako.sampling_params import PoolingParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jubako.frontend.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; the last two may have a
`"cache_salt"`."""

Message = dict[str, Any]
"""A message of a chat: `{"role": ..., "content": ...}`."""

PROGRESS_AFTER_SECONDS = 1.0
"""Work that is done sooner shows no progress bar."""


Output = RequestOutput | PoolingRequestOutput[PoolingOutput]


class LLM(PoolingMethods, TranscriptionMethods):
    """A model in this process.

    Arguments are options of the engine, by vLLM's names; None leaves the choice to the engine.
    Every other option that the command line has is taken as a keyword too. Raises `JubakoError`
    when the model cannot be loaded.

    Threads may share it: their calls take turns. Close it with `shutdown()`, or use it in a `with`
    statement.
    """

    def __init__(
        self,
        model: str | None = None,
        tokenizer: str | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        block_size: int | None = None,
        num_gpu_blocks_override: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        seed: int = 0,
        device: str = "auto",
        disable_log_stats: bool = False,
        **options: Any,
    ) -> None:
        from jubako.frontend.llm_engine import LLMEngine

        config = JubakoConfig.from_options(
            {
                "model": model,
                "tokenizer": tokenizer,
                "dtype": dtype,
                "max_model_len": max_model_len,
                "block_size": block_size,
                "num_gpu_blocks_override": num_gpu_blocks_override,
                "kv_cache_memory_bytes": kv_cache_memory_bytes,
                "enable_prefix_caching": enable_prefix_caching,
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_batched_tokens,
                "seed": seed,
                "device": device,
                "disable_log_stats": disable_log_stats,
                **options,
            }
        )
        self.llm_engine = LLMEngine(config)
        self._next_id = 0
        self._lock = threading.Lock()
        self._caller: int | None = None
        """The thread that holds the lock."""
        self._closed = False

    # -- generation ---------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt; the outputs are in the order of the prompts.

        A list of ints is one prompt, a list of prompts many. `sampling_params` and `priority`
        (lower is sooner) are for all prompts, or one for each. Without `sampling_params` the
        model's own defaults are used, and at most 16 tokens generated.

        `use_tqdm` shows a progress bar on a terminal when the work takes longer than a moment; it
        may be a function that makes the bar.

        All prompts are accepted or none: a bad one raises `ValidationError`. An exception, also an
        interrupt, ends all the requests of this call.
        """
        prompt_list = split_prompts(prompts)
        params = _paired(
            self.get_default_sampling_params() if sampling_params is None else sampling_params,
            SamplingParams,
            len(prompt_list),
            "sampling_params",
        )
        priorities = _paired(0 if priority is None else priority, int, len(prompt_list), "priority")
        with self._turn():
            outputs = self._run_all(prompt_list, params, priorities, use_tqdm)
        return cast(list[RequestOutput], outputs)

    def _pool(
        self, prompts: Any, params: Any, use_tqdm: bool | Callable[..., Any]
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        prompt_list = split_prompts(prompts)
        all_params = _paired(params, PoolingParams, len(prompt_list), "pooling_params")
        with self._turn():
            outputs = self._run_all(prompt_list, all_params, [0] * len(prompt_list), use_tqdm)
        return cast(list[PoolingRequestOutput[PoolingOutput]], outputs)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Have the engine for this thread alone."""
        caller = threading.get_ident()
        if self._caller == caller:
            raise JubakoError("The LLM is at work; it cannot be called from within a call.")
        with self._lock:
            self._caller = caller
            try:
                yield
            finally:
                self._caller = None

    def _run_all(
        self,
        prompts: list[Prompt],
        params: Sequence[SamplingParams | PoolingParams],
        priorities: list[int],
        use_tqdm: bool | Callable[..., Any],
    ) -> list[Output]:
        ids: list[str] = []
        finished: dict[str, Output] = {}
        try:
            for prompt, param, rank in zip(prompts, params, priorities):
                request_id = str(self._next_id)
                self._next_id += 1
                ids.append(request_id)
                self.llm_engine.add_request(
                    request_id,
                    prompt,
                    _with_one_output(param),
                    priority=rank,
                )
            self._run(set(ids), finished, use_tqdm)
        except BaseException:
            self.llm_engine.abort_request([i for i in ids if i not in finished])
            raise
        return [finished[request_id] for request_id in ids]

    def _run(
        self,
        waiting: set[str],
        finished: dict[str, Output],
        use_tqdm: bool | Callable[..., Any],
    ) -> None:
        with _Progress(len(waiting), use_tqdm) as progress:
            while waiting:
                if self._closed:
                    raise EngineDeadError("The engine was shut down.")
                for output in self.llm_engine.step():
                    if output.finished and output.request_id in waiting:
                        waiting.discard(output.request_id)
                        finished[output.request_id] = output
                        progress.add(output)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or every one of a list of conversations.

        The messages become a prompt by `chat_template`, or the model's own. With
        `continue_final_message` and without `add_generation_prompt` the answer continues the last
        message. The rest is as in `generate`.
        """
        conversations = split_conversations(messages)
        tokenizer = self.get_tokenizer()
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(
                list(conversation),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            # The template writes the start-of-sequence token itself.
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm, priority=priority)

    # -- the rest -----------------------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokeniser."""
        tokenizer: Tokenizer = self.llm_engine.tokenizer
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters that the model recommends; neutral where it recommends nothing."""
        config = self.llm_engine.config.model_config.generation_config
        return SamplingParams(**default_sampling_values(config))

    def reset_prefix_cache(self) -> bool:
        """Forget all KV that is kept for re-use; False, and nothing done, while some is in use."""
        with self._turn():
            return bool(self.llm_engine.reset_prefix_cache())

    def get_metrics(self) -> Any:
        """Statistics of the engine so far."""
        return self.llm_engine.get_metrics()

    def shutdown(self) -> None:
        """Free the model and its memory. Calling it again does nothing.

        Calls in other threads raise `EngineDeadError`.
        """
        self._closed = True
        if self._caller == threading.get_ident():
            self.llm_engine.shutdown()
            return
        with self._turn():
            self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts in what a caller gave: one prompt, or a sequence of them."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise ValidationError(
            f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}.",
            "prompts",
        )
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return [items]
    for i, item in enumerate(items):
        if isinstance(item, int | float | bytes | None):
            raise ValidationError(
                f"prompts[{i}] is {type(item).__name__}; a prompt is a text, a list of token ids, "
                'or {"prompt_token_ids": [...]}.',
                "prompts",
            )
    return items


def split_conversations(messages: Any) -> list[Any]:
    """The conversations in what a caller gave: one list of messages, or a list of such lists."""
    if not _is_list(messages):
        raise ValidationError(
            f"messages must be a list of messages, got {type(messages).__name__}.", "messages"
        )
    conversations = [messages] if all(isinstance(m, Mapping) for m in messages) else list(messages)
    for conversation in conversations:
        if not _is_list(conversation) or not all(isinstance(m, Mapping) for m in conversation):
            raise ValidationError(
                'messages must be a list of messages like {"role": "user", "content": "Hi"}, or a '
                "list of such lists.",
                "messages",
            )
        if not conversation:
            raise ValidationError("messages must hold at least one message.", "messages")
    return conversations


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _paired(value: Any, kind: type, count: int, name: str) -> list[Any]:
    """`value` for each of `count` prompts; a list must have exactly one for each."""
    if isinstance(value, kind):
        return [value] * count
    values = list(value) if isinstance(value, Sequence) else None
    if values is None or not all(isinstance(v, kind) for v in values):
        raise ValidationError(
            f"{name} must be of type {kind.__name__}, or a list of them.", name, value
        )
    if len(values) != count:
        raise ValidationError(
            f"{name} has {len(values)} entries for {count} prompts; give one, or one for each.",
            name,
        )
    return values


def _with_one_output(params: SamplingParams | PoolingParams) -> SamplingParams | PoolingParams:
    if isinstance(params, SamplingParams):
        return params.clone(output_kind=RequestOutputKind.FINAL_ONLY)
    return params


class _Progress:
    """A progress bar over requests that also shows tokens a second."""

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]) -> None:
        self._bar: Any = None
        self._input = self._output = 0
        if not use_tqdm:
            return
        options: dict[str, Any] = {
            "total": total,
            "desc": "Processed prompts",
            "dynamic_ncols": True,
            "unit": "prompt",
        }
        if callable(use_tqdm) and use_tqdm is not True:
            self._bar = use_tqdm(**options)
        elif sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(**options, delay=PROGRESS_AFTER_SECONDS)

    def add(self, output: Output) -> None:
        """One more request is done."""
        if self._bar is None:
            return
        self._input += len(output.prompt_token_ids)
        if isinstance(output, RequestOutput):
            self._output += sum(len(completion.token_ids) for completion in output.outputs)
        seconds = max(self._bar.format_dict["elapsed"], 1e-9)
        self._bar.set_postfix_str(
            f"input {self._input / seconds:.1f} tokens/s, "
            f"output {self._output / seconds:.1f} tokens/s",
            refresh=False,
        )
        self._bar.update(1)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
