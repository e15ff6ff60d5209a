"""What does a row of the matrix have? A model on disk, transformers beside it, and our engines."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from jubako import LLM, RequestOutput, SamplingParams
from jubako.engine.client import InprocClient
from jubako.kv_cache import KVCacheSpec, SinkFullAttentionSpec
from tests.exactness import encoder_decoder, oracle
from tests.exactness.sizes import VOCAB, Size

KV_BYTES = 1 << 26


class Subject:
    """One tiny model. Engines with equal options are built once. Close it when done."""

    def __init__(self, name: str, size: Size) -> None:
        self.name = name
        self.size = size
        self.folder = Path(tempfile.mkdtemp(prefix="exactness-"))
        torch.set_num_threads(1)
        model = oracle.make_model(name, self.folder)
        self.model_config = model.config
        self.has_encoder = bool(model.config.is_encoder_decoder)
        """Whether it reads an input of its own before the prompt, which then runs in one step."""
        self.oracle = self._oracle_of(model)
        self.prompts = oracle.make_prompts(size.lengths, VOCAB, seed=7)
        self._engines: dict[str, LLM] = {}

    def __enter__(self) -> Subject:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the engines and remove the model."""
        for llm in self._engines.values():
            llm.shutdown()
        self._engines.clear()
        shutil.rmtree(self.folder)

    def _oracle_of(self, model: Any) -> oracle.Oracle:
        if self.has_encoder:
            return encoder_decoder.EncoderDecoderOracle(model)
        return oracle.Oracle(model, step_by_step=self.size.step_by_step)

    def rounded_oracle(self) -> oracle.Oracle:
        """transformers in bfloat16."""
        loader = oracle.auto_class(self.model_config)
        return self._oracle_of(loader.from_pretrained(self.folder, dtype=torch.bfloat16).eval())

    def given(self, prompt: Prompt) -> list[int]:
        """The token ids of `prompt` as the model is to see them."""
        if self.has_encoder:
            return encoder_decoder.begun(prompt.ids, self.model_config)
        return prompt.ids

    def as_input(self, prompt: Prompt) -> dict[str, Any]:
        """What `LLM.generate` takes."""
        salt = {} if prompt.salt is None else {"cache_salt": prompt.salt}
        if self.has_encoder:
            return encoder_decoder.as_input(self.given(prompt), self.model_config) | salt
        return {"prompt_token_ids": prompt.ids, **salt}

    def engine(self, **options: Any) -> LLM:
        """Our engine, with nothing cached; float32 and one step after the other unless told."""
        options = {
            "dtype": "float32",
            "max_model_len": self.size.max_model_len,
            "block_size": 16,
            "kv_cache_memory_bytes": KV_BYTES,
            "async_scheduling": False,
            "num_threads": 1,
            "max_logprobs": -1,
        } | options
        key = repr(sorted(options.items()))
        if key not in self._engines:
            self._engines[key] = LLM(model=str(self.folder), **options)
        llm = self._engines[key]
        assert llm.reset_prefix_cache(), "no request is left, so every block is free"
        return llm

    def generate(
        self,
        llm: LLM,
        prompts: Sequence[Prompt],
        what: str,
        n: int = 1,
        max_tokens: int | None = None,
    ) -> tuple[list[RequestOutput], int]:
        """Generate together and judge; the outputs, and how many tokens tie."""
        count = self.size.max_tokens if max_tokens is None else max_tokens
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, n=n)
        outputs = llm.generate([self.as_input(p) for p in prompts], params, use_tqdm=False)
        ties = 0
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = self.given(prompt)
            assert output.prompt_token_ids == ids
            assert len(output.outputs) == n
            for answer in output.outputs:
                assert answer.finish_reason == "length"
                assert len(answer.token_ids) == count
                ties += self.oracle.judge(
                    ids, answer.token_ids, f"{what}, {output.num_cached_tokens} cached"
                )
        return outputs, ties


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the salt of the part of the cache that they may use."""

    ids: list[int]
    salt: str | None = None


def kv_groups(llm: LLM) -> list[KVCacheSpec]:
    """What the engine caches, a spec a group."""
    client = llm.llm_engine.client
    assert isinstance(client, InprocClient)
    groups = client.core.scheduler.kv_cache_config.kv_cache_groups
    return [group.kv_cache_spec for group in groups]


def blocks_of_one_request(llm: LLM) -> int:
    """Blocks that a request of the longest length may hold, the null block, and those of sinks."""
    client = llm.llm_engine.client
    assert isinstance(client, InprocClient)
    specs = kv_groups(llm)
    sinks = sum(s.sink_len // s.block_size for s in specs if isinstance(s, SinkFullAttentionSpec))
    own = sum(s.max_memory_usage_bytes(client.config) // s.page_size_bytes for s in specs)
    return 1 + sinks + own
