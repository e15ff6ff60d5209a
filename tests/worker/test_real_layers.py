"""The runner drives real attention layers: a tiny Gemma 3 with window and full layers."""

from __future__ import annotations

import random

import pytest
import torch

from jubako.kv_cache.sizing import get_kv_cache_configs
from jubako.models.load import build_model, cache_layers
from jubako.sampling_params import SamplingParams
from jubako.worker.model_runner import ModelRunner
from tests.worker.driver import Driver, Job
from tests.worker.stub_model import make_config
from tests.worker.test_random_steps import run_mixed

VOCAB, WINDOW = 96, 6
HF_CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_theta": 10000.0,
    "rope_local_base_freq": 1000.0,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
NUM_BLOCKS = 150


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    config = make_config().replace(
        model_config={
            "hf_config": HF_CONFIG,
            "architecture": "Gemma3ForCausalLM",
            "vocab_size": VOCAB,
        }
    )
    model = build_model(config, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def make_real_runner(model: torch.nn.Module) -> tuple[ModelRunner, list]:
    config = make_config(vocab_size=VOCAB).replace(
        model_config={"hf_config": HF_CONFIG, "architecture": "Gemma3ForCausalLM"},
        cache_config={"num_gpu_blocks_override": NUM_BLOCKS},
    )
    runner = ModelRunner(config, torch.device("cpu"))
    runner.use_model(model, cache_layers(model))
    [kv_config] = get_kv_cache_configs(config, [runner.get_kv_cache_spec()], [1 << 24])
    runner.initialize_kv_cache(kv_config)
    for buffer in runner.kv_buffers:
        # NaN wherever nothing was written.
        buffer.view(torch.float32).fill_(torch.nan)
    groups = [
        (
            group.kv_cache_spec.block_size,
            getattr(group.kv_cache_spec, "sliding_window", None),
            len(group.layer_names),
        )
        for group in kv_config.kv_cache_groups
    ]
    return runner, groups


def test_any_schedule_gives_the_tokens_of_running_alone(model: torch.nn.Module) -> None:
    rng = random.Random(5)
    stem = [rng.randrange(VOCAB) for _ in range(20)]
    jobs = [
        Job(
            f"r{i}",
            stem[: rng.randint(0, 20)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))],
            SamplingParams(temperature=0.0 if i % 2 else 0.9, top_p=0.9),
            seed=i,
            max_tokens=rng.randint(2, 10),
        )
        for i in range(12)
    ]
    runner, groups = make_real_runner(model)
    assert {window for _, window, _ in groups} == {None, WINDOW}
    run_mixed(Driver(runner, groups, NUM_BLOCKS, seed=5), jobs, rng)
    runner, groups = make_real_runner(model)
    alone = Driver(runner, groups, NUM_BLOCKS)
    for job in jobs:
        assert job.output == alone.run_alone(job).output
    # The model's choices must depend on what it reads.
    assert len({tuple(job.output[:2]) for job in jobs}) > 6
