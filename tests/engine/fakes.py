"""An executor without a model, and a checkpoint for it: a token is a sum of all before it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models

from jubako.executor.executor import Executor
from jubako.kv_cache.specs import FullAttentionSpec
from jubako.scheduler.model_output import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    DraftTokenIds,
    KVConnectorOutput,
    LogprobsLists,
    ModelRunnerOutput,
)
from jubako.scheduler.output import SchedulerOutput

EXECUTOR = "tests.engine.fakes.FakeExecutor"
VOCAB_SIZE = 300
MAX_MODEL_LEN = 128
EOS = 1

DIE, HANG, FAIL, LOSE_WORKERS, INTERRUPT = 290, 291, 292, 293, 294
"""A prompt with one of these does that to the process in its first step."""
SLOW = 295
"""Each step of a prompt with this takes 10 ms, so that a request is still there when one looks."""


def next_token(token_ids: Sequence[int]) -> int:
    """The token after `token_ids`: never one that means something."""
    return 3 + (sum(token_ids) * 7 + len(token_ids) * 13) % 256


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The first `count` tokens after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeExecutor(Executor):
    """Mirrors the requests as a worker does, and computes their next tokens from the mirror.

    With `async_scheduling` it does so in a thread of its own; `gate`, while it is cleared, holds
    that thread up before each first phase.
    """

    def __init__(self, config: Any, checkpoint: Any) -> None:
        super().__init__(config, checkpoint)
        self.tokens: dict[str, list[int]] = {}
        self.params: dict[str, Any] = {}
        self.step: SchedulerOutput | None = None
        self.prompted: set[str] = set()
        """Requests whose prompt logprobs were returned."""
        self.num_steps = 0
        self.was_shut_down = False
        self.gate = threading.Event()
        self.gate.set()
        self.num_drafts = 0
        self.drafts: dict[str, list[int]] = {}
        """What the last step proposed for the next."""
        self.masks: list[Any] = []
        """What the second phases were given."""
        self.kv_report: KVConnectorOutput | None = None
        """For the next step's result."""
        self._thread: ThreadPoolExecutor | None = None
        if config.scheduler_config.async_scheduling:
            self._thread = ThreadPoolExecutor(1)

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        block_size = self.config.cache_config.block_size
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32"
        )
        return [{"layer": spec}]

    def determine_available_memory(self) -> list[int]:
        return [self.config.cache_config.kv_cache_memory_bytes or 1 << 20]

    def _initialize_kv(self, kv_cache_configs: Sequence[Any]) -> None:
        self.kv_cache_configs = kv_cache_configs

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [None]

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        return self._call(lambda: self._execute(scheduler_output), non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self._call(lambda: self._sample(grammar_output), non_block)

    def _call(self, call: Callable[[], Any], non_block: bool) -> Any:
        if self._thread is not None:
            submitted = self._thread.submit(call)
            return submitted if non_block else submitted.result()
        if not non_block:
            return call()
        future: Future[Any] = Future()
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)
        return future

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        self.gate.wait()
        self.num_steps += 1
        for request_id in step.finished_req_ids:
            self.tokens.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prompt_token_ids or ())
            self.params[new.req_id] = new.sampling_params
            if DIE in self.tokens[new.req_id]:
                os.kill(os.getpid(), signal.SIGKILL)
            if HANG in self.tokens[new.req_id]:
                threading.Event().wait()
            if FAIL in self.tokens[new.req_id]:
                raise RuntimeError("the secret reason of the failure")
            if LOSE_WORKERS in self.tokens[new.req_id]:
                threading.Thread(target=self.on_failure).start()
            if INTERRUPT in self.tokens[new.req_id]:
                signal.raise_signal(signal.SIGINT)
        cached = step.scheduled_cached_reqs
        for request_id in cached.resumed_req_ids:
            # Without what has been thrown away.
            self.tokens[request_id] = list(cached.all_token_ids[request_id])
        if not step.total_num_scheduled_tokens:
            report, self.kv_report = self.kv_report, None
            if report is not None:
                return ModelRunnerOutput(kv_connector_output=report)
            return EMPTY_MODEL_RUNNER_OUTPUT
        if any(SLOW in self.tokens[request_id] for request_id in step.num_scheduled_tokens):
            threading.Event().wait(0.01)
        self.step = step
        return None

    def _sample(self, grammar_output: Any) -> ModelRunnerOutput | None:
        if self.step is None:
            return None
        step, self.step = self.step, None
        self.masks.append(grammar_output)
        report, self.kv_report = self.kv_report, None
        computed = {r.req_id: r.num_computed_tokens for r in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens))
        ids = list(step.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for request_id, count in step.num_scheduled_tokens.items():
            tokens = self.tokens[request_id]
            drafts = self._drafts_to_verify(step, request_id)
            if computed[request_id] + count - len(drafts) < len(tokens):
                sampled.append([])
                continue
            new: list[int] = []
            for draft in [*drafts, None]:
                new.append(next_token(tokens + new))
                if draft != new[-1]:
                    break
            tokens += new
            sampled.append(new)
        self._propose([i for i, new in zip(ids, sampled) if new])
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=self._logprobs(ids, sampled),
            prompt_logprobs_dict=self._prompt_logprobs(ids, sampled),
            kv_connector_output=report,
        )

    def _drafts_to_verify(self, step: SchedulerOutput, request_id: str) -> list[int]:
        drafts = step.scheduled_spec_decode_tokens.get(request_id, [])
        if drafts and drafts[0] == -1:
            # Planned before they were made.
            drafts = self.drafts.get(request_id, [])[: len(drafts)]
        return drafts

    def _propose(self, request_ids: list[str]) -> None:
        """Some drafts right, the others wrong."""
        self.drafts = {}
        for request_id in request_ids if self.num_drafts else ():
            tokens = self.tokens[request_id]
            right = continuation(tokens, len(tokens) % (self.num_drafts + 1))
            self.drafts[request_id] = right + [0] * (self.num_drafts - len(right))

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        if not self.num_drafts:
            return None
        return DraftTokenIds(list(self.drafts), list(self.drafts.values()))

    def _logprobs(self, ids: list[str], sampled: list[list[int]]) -> LogprobsLists | None:
        counts = [self.params[i].logprobs for i in ids]
        if all(c is None for c in counts):
            return None
        width = max(c or 0 for c in counts)
        rows = [logprob_row(s[0] if s else 0, width) for s in sampled]
        return as_logprobs(rows)

    def _prompt_logprobs(
        self, ids: list[str], sampled: list[list[int]]
    ) -> dict[str, LogprobsLists | None]:
        found: dict[str, LogprobsLists | None] = {}
        for request_id, new in zip(ids, sampled):
            count = self.params[request_id].prompt_logprobs
            prompt = self.tokens[request_id][: -len(new)] if new else []
            if count is not None and new and request_id not in self.prompted:
                self.prompted.add(request_id)
                found[request_id] = as_logprobs([logprob_row(t, count) for t in prompt[1:]])
        return found

    def _output_of(self, method: str, argument: Any, non_block: bool) -> Any:
        raise NotImplementedError

    def register_failure_callback(self, callback: Any) -> None:
        self.on_failure = callback

    def check_health(self) -> None:
        return

    def shutdown(self) -> None:
        self.was_shut_down = True
        self.gate.set()
        if self._thread is not None:
            self._thread.shutdown()


def logprob_row(token_id: int, width: int) -> tuple[list[int], list[float], int]:
    """The chosen token with rank 2, then the `width` best: its successors."""
    ids = [token_id, *((token_id + 1 + i) % VOCAB_SIZE for i in range(width))]
    return ids, [-0.5 * (i + 1) for i in range(width + 1)], 2


def as_logprobs(rows: list[tuple[list[int], list[float], int]]) -> LogprobsLists | None:
    if not rows:
        return None
    return LogprobsLists(
        np.array([r[0] for r in rows], np.int32),
        np.array([r[1] for r in rows], np.float32),
        np.array([r[2] for r in rows], np.int32),
    )


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 2 are special, 3 to 258 the bytes, the rest words."""
    vocab = {"<unk>": 0, "<eos>": EOS, "<bos>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {f"\u2581word{i}": i for i in range(259, VOCAB_SIZE)}
    model = models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", "<eos>", "<bos>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def write_checkpoint(folder: Path) -> Path:
    """A folder that opens as a model, with the tokeniser and no weights to speak of."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_MODEL_LEN,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "bos_token": "<bos>"})
    )
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    save_file({"nothing": np.zeros(1, np.float32)}, str(folder / "model.safetensors"))
    return folder
