"""An engine with an encoder-decoder model: what it sets up, keeps and refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from jubako import LLM, SamplingParams
from jubako.config import JubakoConfig
from jubako.engine.client import InprocClient
from jubako.engine.core import EngineCore
from jubako.engine.encoder_input import text_feature
from jubako.engine.messages import EngineCoreRequest, FinishReason
from jubako.errors import CheckpointError, ConfigError, ValidationError
from jubako.kv_cache import CrossAttentionSpec
from jubako.layers.cross_attention import CrossAttention
from jubako.scheduler.features import MultiModalFeatureSpec, PlaceholderRange
from jubako.worker.encoder_step import EncoderStep
from tests.exactness import oracle

BLOCK = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bart")
    oracle.make_model("bart", path)
    return path


def make_llm(folder: Path, **options: Any) -> LLM:
    options = {
        "dtype": "float32",
        "block_size": BLOCK,
        "kv_cache_memory_bytes": 1 << 26,
        "num_threads": 1,
    } | options
    return LLM(model=str(folder), **options)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with make_llm(folder) as llm:
        yield llm


def core_of(llm: LLM) -> EngineCore:
    client = llm.llm_engine.client
    assert isinstance(client, InprocClient)
    return client.core


def test_what_follows_from_the_model(llm: LLM) -> None:
    config: JubakoConfig = llm.llm_engine.config
    assert config.encoder_config.modality == "text"
    assert config.encoder_config.default_decoder_prompt == (2,)
    assert config.cache_config.enable_prefix_caching is False
    assert not config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.max_num_encoder_input_tokens == 1024
    assert config.scheduler_config.token_budget >= config.model_config.context_length


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": True},
        {"max_num_encoder_input_tokens": 1023},
        {"encoder_cache_size": 1023},
        {"long_prefill_token_threshold": 8},
        {"max_num_batched_tokens": 512},
    ],
)
def test_options_that_do_not_suit_it(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        make_llm(folder, **options)


def test_a_checkpoint_must_say_what_a_decoder_begins_with(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    for wrong in (None, 256, -1, True):
        (tmp_path / "config.json").write_bytes(
            msgspec.json.encode(config | {"decoder_start_token_id": wrong})
        )
        with pytest.raises(CheckpointError, match="decoder_start_token_id"):
            make_llm(tmp_path)


def test_options_for_encoders_need_one(tmp_path: Path) -> None:
    oracle.make_model("llama", tmp_path)
    with pytest.raises(ConfigError, match="encoder-decoder"):
        make_llm(tmp_path, encoder_cache_size=5)
    with (
        make_llm(tmp_path) as llm,
        pytest.raises(ValidationError, match="no encoder") as caught,
    ):
        llm.generate([{"encoder_prompt": "w5", "decoder_prompt": "w6"}], GREEDY, use_tqdm=False)
    assert caught.value.parameter == "encoder_prompt"


def test_an_output_shows_both_prompts(llm: LLM) -> None:
    prompt = {"encoder_prompt": "w5 w6", "decoder_prompt": "w7"}
    for params in (GREEDY, GREEDY.clone(n=2)):
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.encoder_prompt == "w5 w6"
        assert output.encoder_prompt_token_ids == [5, 6]
        assert output.prompt == "w7"
        assert output.prompt_token_ids == [2, 7]
        assert len({tuple(answer.token_ids) for answer in output.outputs}) == 1


def test_encoder_outputs_are_written_once(llm: LLM) -> None:
    """Blocks for the encoder's output come at admission; nobody touches what is in them later."""
    core = core_of(llm)
    group = next(
        i
        for i, g in enumerate(core.scheduler.kv_cache_config.kv_cache_groups)
        if isinstance(g.kv_cache_spec, CrossAttentionSpec)
    )
    layers = [
        layer
        for layer in core.executor.worker.model_runner.layers.values()
        if isinstance(layer, CrossAttention)
    ]
    assert len(layers) == 2
    lengths = [1, 16, 17, 300, 40, 900]
    seen: dict[str, tuple[list[int], torch.Tensor]] = {}
    names = {}
    for i, length in enumerate(lengths):
        prompt = {"encoder_prompt": [3 + i] * length, "decoder_prompt": [2] + [9] * i}
        names[llm.llm_engine.add_request(str(i), prompt, GREEDY)] = length
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        for name, length in names.items():
            if (
                name not in core.scheduler.requests
                or not core.scheduler.requests[name].num_computed_tokens
            ):
                continue
            blocks = core.scheduler.kv_cache_manager.get_block_ids(name)[group]
            assert len(blocks) == -(-length // BLOCK)
            # [layers, blocks, Hkv, 2, B, D], without what lies behind the last token
            pages = torch.stack([layer.kv.pages[blocks] for layer in layers])
            pages = pages.movedim(4, 2).flatten(1, 2)[:, :length].clone()
            before = seen.setdefault(name, (blocks, pages))
            assert before[0] == blocks
            assert torch.equal(before[1], pages)
    assert seen.keys() == names.keys()
    # The scheduler's room for outputs is what it was.
    cache = core.scheduler.encoder_cache_manager
    assert cache.num_free_slots == cache.cache_size


class _Encoder:
    """Makes of ids [n] the outputs [n, 1]."""

    def encode(self, inputs: Any) -> list[torch.Tensor]:
        return [item["input_ids"][:, None] for item in inputs]


def test_outputs_belong_to_rows_by_id() -> None:
    ids = ["a", "b", "c", "d"]
    lengths = {"a": 3, "b": 1, "c": 4, "d": 2}
    requests: Any = {
        name: SimpleNamespace(
            req_id=name, mm_features=[text_feature([number] * lengths[name], name)]
        )
        for number, name in enumerate(ids)
    }
    for order in (["b", "d", "a", "c"], ["c", "a", "d", "b"]):
        batch: Any = SimpleNamespace(
            req_ids=order,
            req_id_to_index={name: row for row, name in enumerate(order)},
            num_computed_tokens_cpu=np.zeros(4),
            num_encoder_tokens=np.array([lengths[name] for name in order]),
        )
        step = EncoderStep(_Encoder(), JubakoConfig().encoder_config, torch.device("cpu"))
        for scheduled in ({"a": [0], "b": [0], "c": [0]}, {"c": [0], "a": [0], "b": [0]}):
            done = step.run(batch, requests, scheduled)
            assert done is not None
            assert done.rows.tolist() == sorted(order.index(name) for name in scheduled)
            for row, output in zip(done.rows.tolist(), done.outputs, strict=True):
                assert output[:, 0].tolist() == [ids.index(order[row])] * lengths[order[row]]
        assert step.run(batch, requests, {}) is None


def test_a_bad_input_ends_one_request(llm: LLM) -> None:
    """Also one that no front end of ours would send."""
    core = core_of(llm)
    good = EngineCoreRequest("good", [2], [text_feature([5, 6, 7], "x")], GREEDY, None, None, 0.0)
    spectrogram = {"input_features": np.zeros((16, 120), np.float32)}
    bad: dict[str, list[MultiModalFeatureSpec] | None] = {
        "none": None,
        "too long": [text_feature([5] * 1025, "x")],
        "empty": [text_feature([], "x")],
        "two": [text_feature([5], "x"), text_feature([6], "y")],
        "other": [MultiModalFeatureSpec(spectrogram, "audio", "x", PlaceholderRange(0, 60))],
    }
    core.add_request(good)
    for name, features in bad.items():
        core.add_request(msgspec.structs.replace(good, request_id=name, mm_features=features))
    reasons: dict[str, Any] = {}
    tokens = 0
    while len(reasons) <= len(bad):
        outputs, _ = core.step()
        for message in outputs.values():
            for output in message.outputs:
                if output.request_id == "good":
                    tokens += len(output.new_token_ids)
                if output.finish_reason is not None:
                    reasons[output.request_id] = output.finish_reason
                    assert output.request_id == "good" or output.error
    assert reasons == dict.fromkeys(bad, FinishReason.ERROR) | {"good": FinishReason.LENGTH}
    assert tokens == GREEDY.max_tokens
