"""How does one step run: update the batch, prepare inputs, forward, sample?

A step has two phases. `execute_model` runs the model and keeps the logits; `sample_tokens` chooses
the tokens, so that a grammar's mask can be computed in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from jubako.config import JubakoConfig
from jubako.errors import ConfigError, NotImplementedFeatureError
from jubako.kv_cache.config import KVCacheConfig
from jubako.kv_cache.sinks import sink_block_ids
from jubako.kv_cache.specs import CrossAttentionSpec, KVCacheSpec
from jubako.layers.encoder_attention import EncoderOnlyAttention
from jubako.layers.forward_context import set_forward_context
from jubako.models.kept_weights import KeptWeights
from jubako.sampling.builtin_processors import build_processors
from jubako.sampling.grammar import apply_grammar_mask, mask_addresses
from jubako.sampling.head_sampler import HeadSampler
from jubako.sampling.logits_processors import LogitsProcessor
from jubako.sampling.pooling_metadata import PoolingStates
from jubako.sampling.sampler import (
    NO_NUMBERS,
    NO_TOKEN,
    Sampler,
    SamplerOutput,
    takes_best_tokens,
)
from jubako.scheduler.model_output import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    LogprobsLists,
    ModelRunnerOutput,
)
from jubako.scheduler.output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from jubako.worker.block_table import MultiGroupBlockTable, select_kernel_block_size
from jubako.worker.encoder_step import EncoderStep, HasEncoder
from jubako.worker.input_batch import InputBatch
from jubako.worker.kv_memory import KVLayer, bind_kv_tensors, write_sinks
from jubako.worker.native_step import NativeStep
from jubako.worker.pooling import NEUTRAL_SAMPLING, PoolingStep
from jubako.worker.prompt_logprobs import PromptLogprobs
from jubako.worker.request_state import CachedRequestState
from jubako.worker.staging import StepStaging
from jubako.worker.step_inputs import NO_ROWS, StepInputBuilder, StepInputs, dummy_inputs


class LanguageModel(Protocol):
    """A model as the runner sees it."""

    def __call__(self, input_ids: Tensor, positions: Tensor, **more: Any) -> Tensor:
        """Ids [T] int32 and positions [T] int64 → hidden states [T, h]."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [r, h] → logits [r, V], a new tensor that the caller may overwrite."""


class ExecuteModelState(NamedTuple):
    """What the first phase leaves for the second."""

    inputs: StepInputs
    hidden_states: Tensor
    """[T, h]; of the sampled tokens only if there are tokens `chosen`."""
    logits: Tensor | None
    """[r, V], one row for each of `inputs.logits_rows`; None if no row is sampled, or `chosen`."""
    chosen: np.ndarray[Any, np.dtype[np.int64]] | None = None
    """[r], the rows' tokens where the model chose them itself; -1 for none."""
    states: Tensor | None = None
    """[r, h], the rows' hidden states where tokens may be chosen without logits."""


class ModelRunner:
    """Owns the requests' mirror, the batch, the KV tensors and the sampler of one worker.

    `model` and its attention `layers` come from `load_model`, or are handed to `use_model`.
    """

    def __init__(
        self,
        config: JubakoConfig,
        device: torch.device,
        custom_processors: list[type[LogitsProcessor]] | None = None,
        staging: StepStaging | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.max_num_reqs = config.scheduler_config.seq_limit
        self.max_num_tokens = config.scheduler_config.token_budget
        self.max_model_len = config.model_config.context_length
        self.vocab_size = config.model_config.vocab_size
        self.requests: dict[str, CachedRequestState] = {}
        self._scored: set[str] = set()
        """Requests whose prompt logprobs are not complete."""
        self.sampler = Sampler()
        self._head_sampler: HeadSampler | None = None
        """Instead of logits and sampler, where a native head finds candidates."""
        self.kv_buffers: list[Tensor] = []
        self._staging = staging or StepStaging(device)
        self._logitsprocs = build_processors(config, device, custom_processors)
        self._state: ExecuteModelState | None = None
        self._pooling: PoolingStep | None = None
        """Instead of sampling, for a model that pools."""
        self._native: NativeStep | None = None
        """Instead of calling the model, where it can be one native program."""
        self._encoder: EncoderStep | None = None
        """Of an encoder-decoder model."""
        self._seeds = np.random.default_rng()
        self.model: LanguageModel
        self.kept_weights: KeptWeights | None = None
        """What can write the model's weights for the next start."""
        self.layers: Mapping[str, KVLayer] = {}
        self.input_batch: InputBatch
        self.reseed()

    # -- start-up -----------------------------------------------------------------------------

    def load_model(self, checkpoint: Any) -> None:
        """Build the model and read its weights."""
        from jubako.models.load import cache_layers, ready_model

        model, self.kept_weights = ready_model(self.config, checkpoint, self.device)
        self.use_model(cast(LanguageModel, model), cache_layers(model))
        dtype = getattr(torch, self.config.model_config.dtype)
        if self._pooling is None:
            self._native = NativeStep.of(model, dtype, self.max_num_tokens, self.max_num_reqs)
        if self._native is not None and self._native.candidates is not None:
            self._head_sampler = HeadSampler(self._native.candidates, self.sampler)

    def use_model(self, model: LanguageModel, layers: Mapping[str, KVLayer]) -> None:
        """Run this model; `layers` are its attention layers by name."""
        self.model = model
        self.layers = layers
        if self.config.model_config.pools:
            self._pooling = PoolingStep(self.config, model, self.device)
        if self.config.encoder_config.is_encoder_decoder:
            assert isinstance(model, HasEncoder), "an encoder-decoder model has encode()"
            self._encoder = EncoderStep(model, self.config.encoder_config, self.device)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What each attention layer keeps in the KV cache."""
        block_size = self.config.cache_config.block_size
        if block_size is None:
            raise ConfigError("block_size is not known before the options are complete.")
        return {name: layer.get_kv_cache_spec(block_size) for name, layer in self.layers.items()}

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV tensors and the batch that addresses them. Drops all requests."""
        groups = kv_cache_config.kv_cache_groups
        block_sizes = [group.kv_cache_spec.block_size for group in groups]
        kernel_sizes = [
            select_kernel_block_size(
                size,
                [
                    getattr(self.layers[name], "supported_kernel_block_sizes", None)
                    for name in group.layer_names
                ],
            )
            for group, size in zip(groups, block_sizes)
        ]
        by_layer = {
            name: sizes
            for group, sizes in zip(groups, zip(block_sizes, kernel_sizes))
            for name in group.layer_names
        }
        self.kv_buffers = bind_kv_tensors(kv_cache_config, self.layers, by_layer, self.device)
        table = MultiGroupBlockTable.build(
            block_sizes,
            kernel_sizes,
            self.max_num_reqs,
            self.max_model_len,
            self.max_num_tokens,
            sink_blocks=sink_block_ids(groups),
            encoder_groups=[
                i for i, g in enumerate(groups) if isinstance(g.kv_cache_spec, CrossAttentionSpec)
            ],
            max_num_encoder_tokens=self.config.scheduler_config.max_num_encoder_input_tokens,
        )
        write_sinks(groups, self.layers, table)
        if self._native is not None:
            names = [group.layer_names for group in groups]
            self._native.bind(self.layers, names, self.max_model_len)
        self.requests.clear()
        self._scored.clear()
        self._state = None
        self.input_batch = InputBatch(
            self.max_num_reqs, self.max_model_len, self.vocab_size, table, self._logitsprocs
        )
        self._input_builder = StepInputBuilder(
            self.max_num_reqs,
            self.max_num_tokens,
            [group.layer_names for group in groups],
            self._staging,
            [n for n, layer in self.layers.items() if isinstance(layer, EncoderOnlyAttention)],
        )

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int, num_logits_rows: int) -> None:
        """One step on made-up tokens that touches no KV, to measure memory and warm up."""
        input_ids, positions = dummy_inputs(num_tokens, self.device, self.max_model_len)
        if self._native is not None:
            hidden = self._native.dry_run(input_ids, positions)
            if num_logits_rows:
                self.model.compute_logits(hidden[:num_logits_rows]).argmax(dim=-1).tolist()
            return
        with set_forward_context(None):
            hidden = self.model(input_ids, positions)
        if num_logits_rows and self._pooling is None:
            self.model.compute_logits(hidden[:num_logits_rows]).argmax(dim=-1).tolist()

    @torch.inference_mode()
    def dummy_encode(self) -> None:
        """Run the encoder, if there is one, on as much as a step may bring it, and a decoder's
        token beside it: as `dummy_run`."""
        if self._encoder is None:
            return
        budget = self.config.scheduler_config.max_num_encoder_input_tokens
        outputs = self._encoder.dummy_outputs(budget)
        ids, positions = dummy_inputs(len(outputs), self.device, self.max_model_len)
        with set_forward_context(None):
            self.model(ids, positions, encoder_outputs=outputs)

    def reseed(self) -> None:
        """Start the process's random streams anew, so that warm-up does not shift them."""
        seed = self.config.model_config.seed
        torch.manual_seed(seed)
        self._seeds = np.random.default_rng(seed)

    # -- a step -------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """First phase. None means that `sample_tokens` is to follow.

        RuntimeError if the previous step was not sampled.
        """
        if self._state is not None:
            raise RuntimeError("sample_tokens() must follow execute_model() before the next step")
        self._update_states(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        encoded = None
        if self._encoder is not None:
            encoded = self._encoder.run(
                self.input_batch, self.requests, scheduler_output.scheduled_encoder_inputs
            )
        inputs = self._input_builder.build(
            self.input_batch,
            scheduler_output.num_scheduled_tokens,
            NO_ROWS if encoded is None else encoded.rows,
        )
        if self._pooling is not None:
            return self._pool(self._pooling, inputs)
        if self._native is not None:
            masked = scheduler_output.has_structured_output_requests
            self._state = self._run_native(self._native, inputs, masked)
            return None
        more = {} if encoded is None else {"encoder_outputs": encoded.outputs}
        with set_forward_context(inputs.attention):
            hidden = self.model(inputs.input_ids, inputs.positions, **more)
        logits = None
        if inputs.logits_rows.size:
            logits = self.model.compute_logits(hidden[inputs.logits_indices])
        self._state = ExecuteModelState(inputs, hidden, logits)
        return None

    def _run_native(
        self, native: NativeStep, inputs: StepInputs, masked: bool
    ) -> ExecuteModelState:
        """The rest of the first phase as one native call; with logits where some are `masked`."""
        rows = inputs.logits_rows
        all_rows = bool(self._scored)
        best = bool(rows.size) and not masked
        best = best and takes_best_tokens(self.input_batch.sampling_metadata, rows)
        hidden, chosen = native.run(inputs, all_rows=all_rows, best_tokens=best)
        wanted = hidden[inputs.logits_indices] if all_rows else hidden
        if self._head_sampler is not None and chosen is None:
            return ExecuteModelState(inputs, hidden, None, None, wanted)
        logits = None
        if rows.size and chosen is None:
            logits = self.model.compute_logits(wanted)
        return ExecuteModelState(inputs, hidden, logits, chosen)

    def _pool(self, pooling: PoolingStep, inputs: StepInputs) -> ModelRunnerOutput:
        """The rest of a pooling model's step, which has one phase."""
        more = pooling.model_inputs(self.input_batch, self.requests, inputs)
        with set_forward_context(inputs.attention):
            hidden = self.model(inputs.input_ids, inputs.positions, **more)
        return pooling.output(self.input_batch, self.requests, inputs, hidden)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | None:
        """Second phase: the step's tokens. None if there is no step to finish."""
        state, self._state = self._state, None
        if state is None:
            return None
        batch = self.input_batch
        # Before the new tokens are appended: prompt logprobs read the step's own counts.
        prompt_logprobs = self._prompt_logprobs(state)
        sampled: list[list[int]] = [[] for _ in range(batch.num_reqs)]
        logprobs = None
        rows, logits, chosen = state.inputs.logits_rows, state.logits, state.chosen
        if chosen is not None and grammar_output is not None:
            logits, chosen = self.model.compute_logits(state.hidden_states), None
        failures: dict[str, str] = {}
        if chosen is not None:
            reasons = np.where(chosen < 0, NO_NUMBERS, chosen)
            failures = self._append(rows, reasons.tolist(), sampled)
        elif logits is not None or (state.states is not None and rows.size):
            output = self._sample(state, logits, grammar_output)
            failures = self._append(rows, output.token_ids.tolist(), sampled)
            logprobs = _by_batch_row(output, rows, batch.num_reqs)
        return ModelRunnerOutput(
            req_ids=list(batch.req_ids),
            req_id_to_index=dict(batch.req_id_to_index),
            sampled_token_ids=sampled,
            logprobs=logprobs,
            prompt_logprobs_dict=prompt_logprobs,
            failures=failures or None,
        )

    def _sample(
        self, state: ExecuteModelState, logits: Tensor | None, grammar: GrammarOutput | None
    ) -> SamplerOutput:
        """Tokens of the step's rows, from `logits` [r, V] if there are any."""
        batch, rows = self.input_batch, state.inputs.logits_rows
        n = batch.num_reqs
        output_index = batch.num_tokens_no_spec[:n] - batch.num_prompt_tokens[:n]

        def allow(logits: Tensor, places: np.ndarray[Any, Any]) -> Tensor:
            """Logits of some of the rows, after the grammar's mask."""
            if grammar is not None:
                row_of = {batch.req_ids[row]: i for i, row in enumerate(rows[places].tolist())}
                apply_grammar_mask(logits, grammar, row_of)
            return logits

        if logits is not None:
            logits = allow(logits, np.arange(len(rows)))
            return self.sampler(logits, batch.sampling_metadata, rows, output_index)
        states = state.states
        assert states is not None
        assert self._head_sampler is not None
        allowed = None
        if grammar is not None:
            allowed = mask_addresses(grammar, [batch.req_ids[row] for row in rows.tolist()])
        return self._head_sampler(
            states,
            batch.sampling_metadata,
            rows,
            output_index,
            lambda places: allow(
                self.model.compute_logits(states[torch.from_numpy(places)]), places
            ),
            allowed,
        )

    def _append(
        self, rows: np.ndarray[Any, Any], token_ids: list[int], sampled: list[list[int]]
    ) -> dict[str, str]:
        """Add a new token to each of `rows`, in the batch and in `sampled`.

        Rows with a reason of `NO_TOKEN` get none; their requests, and what to tell, are returned.
        """
        batch = self.input_batch
        # Until the scheduler ends its request, such a row goes on with some token.
        batch.append_tokens(rows, [max(token_id, 0) for token_id in token_ids])
        failures = {}
        for row, token_id in zip(rows.tolist(), token_ids, strict=True):
            if token_id >= 0:
                sampled[row].append(token_id)
            else:
                failures[batch.req_ids[row]] = NO_TOKEN[token_id]
        return failures

    def _prompt_logprobs(self, state: ExecuteModelState) -> dict[str, LogprobsLists | None]:
        """Score prompt positions of this step; results of the prompts that are complete now."""
        finished: dict[str, LogprobsLists | None] = {}
        batch = self.input_batch
        starts = state.inputs.query_start_loc
        for req_id in self._scored.intersection(batch.req_id_to_index):
            request, row = self.requests[req_id], batch.req_id_to_index[req_id]
            assert request.prompt_logprobs is not None
            hidden = state.hidden_states[int(starts[row]) : int(starts[row + 1])]
            computed = int(batch.num_computed_tokens_cpu[row])
            if request.prompt_logprobs.fill(hidden, computed, self.model.compute_logits):
                finished[req_id] = request.prompt_logprobs.result()
                request.prompt_logprobs = None
                self._scored.discard(req_id)
        return finished

    # -- the mirror of the scheduler's requests -----------------------------------------------

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Bring requests and batch to what the scheduler planned. The order is a contract: all
        removals, then updates of rows that stay, then additions."""
        if scheduler_output.scheduled_spec_decode_tokens:
            raise NotImplementedFeatureError("Speculative decoding is not built yet.")
        batch = self.input_batch
        cached = scheduler_output.scheduled_cached_reqs
        scheduled = scheduler_output.num_scheduled_tokens
        for req_id in scheduler_output.finished_req_ids:
            self.requests.pop(req_id, None)
            self._scored.discard(req_id)
            batch.remove_request(req_id)
        idle = [
            req_id
            for req_id in batch.req_id_to_index
            if req_id not in scheduled or req_id in cached.resumed_req_ids
        ]
        for req_id in idle:
            batch.remove_request(req_id)

        entering = []
        for new in scheduler_output.scheduled_new_reqs:
            # A known id continues with a new prompt.
            batch.remove_request(new.req_id)
            self.requests[new.req_id] = request = self._new_request(new)
            entering.append(request)
        entering += self._update_cached(cached)
        for request in entering:
            batch.add_request(request)
        batch.condense()
        batch.refresh_metadata()
        assert batch.req_id_to_index.keys() == scheduled.keys(), (
            "the batch and the scheduler's plan hold different requests"
        )

    def _new_request(self, new: NewRequestData) -> CachedRequestState:
        params = new.sampling_params if self._pooling is None else NEUTRAL_SAMPLING
        if (
            params is None
            or (new.pooling_params is None) != (self._pooling is None)
            or new.prompt_token_ids is None
            or new.prompt_embeds is not None
            or bool(new.mm_features) != (self._encoder is not None)
            or new.lora_request is not None
        ):
            raise NotImplementedFeatureError(
                "Only token ids are taken, by a model that suits the request, and an input for its "
                "encoder if it has one: no embeddings, other media or adapters."
            )
        seed = new.seed if new.seed is not None else params.seed
        if seed is None:
            seed = int(self._seeds.integers(2**64, dtype=np.uint64))
        prompt_logprobs = None
        self._scored.discard(new.req_id)
        if params.prompt_logprobs is not None:
            self._scored.add(new.req_id)
            wanted = params.prompt_logprobs
            wanted = self.vocab_size if wanted == -1 else min(wanted, self.vocab_size)
            prompt_logprobs = PromptLogprobs(new.prompt_token_ids, wanted, self.vocab_size)
        return CachedRequestState(
            req_id=new.req_id,
            prompt_token_ids=new.prompt_token_ids,
            sampling_params=params,
            seed=seed,
            # Copies: in one process these may be the scheduler's own lists.
            block_ids=tuple(list(ids) for ids in new.block_ids),
            num_computed_tokens=new.num_computed_tokens,
            mm_features=new.mm_features,
            pooling_params=new.pooling_params,
            pooling_states=None if self._pooling is None else PoolingStates(),
            prompt_logprobs=prompt_logprobs,
        )

    def _update_cached(self, cached: CachedRequestData) -> list[CachedRequestState]:
        """Apply differences to known requests; returns those that must enter the batch."""
        batch = self.input_batch
        entering = []
        rows, computed = [], []
        for i, req_id in enumerate(cached.req_ids):
            request = self.requests[req_id]
            row = batch.req_id_to_index.get(req_id)
            self._update_outputs(request, row, cached, i)
            new_blocks = cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                assert new_blocks is not None, "a resumed request comes with all its blocks"
                request.block_ids = tuple(list(ids) for ids in new_blocks)
            elif new_blocks is not None:
                for ids, new in zip(request.block_ids, new_blocks, strict=True):
                    ids.extend(new)
            if row is None:
                request.num_computed_tokens = cached.num_computed_tokens[i]
                entering.append(request)
                continue
            rows.append(row)
            computed.append(cached.num_computed_tokens[i])
            if new_blocks is not None:
                batch.block_table.append_row(new_blocks, row)
        batch.num_computed_tokens_cpu[rows] = computed
        return entering

    def _update_outputs(
        self, request: CachedRequestState, row: int | None, cached: CachedRequestData, i: int
    ) -> None:
        """Follow the scheduler where it counts other outputs than this worker has.

        A scheduler that plans ahead counts tokens that it does not know yet. This worker has
        sampled them, since steps run in order.
        """
        output = request.output_token_ids
        known = cached.all_token_ids.get(request.req_id)
        num_known = 0 if known is None else len(known) - request.num_prompt_tokens
        if cached.num_output_tokens:
            wanted = cached.num_output_tokens[i]
        else:
            wanted = len(output) if known is None else num_known
        if known is not None and len(output) < num_known:
            output[:] = known[request.num_prompt_tokens :]
        elif len(output) > wanted:
            # They, or their KV, were lost; they will be computed again.
            del output[wanted:]
        else:
            return
        if row is not None:
            batch = self.input_batch
            batch.set_tokens(row, request)


def _by_batch_row(
    output: SamplerOutput, logits_rows: np.ndarray[Any, Any], num_reqs: int
) -> LogprobsLists | None:
    """The sampler's logprobs, addressed by batch row; rows that asked for none have no entry."""
    if output.logprobs is None:
        return None
    counts = np.zeros(num_reqs, dtype=np.int64)
    counts[logits_rows[output.logprob_rows]] = 1
    output.logprobs.cu_num_generated_tokens = [0, *counts.cumsum().tolist()]
    return output.logprobs
