"""An architecture without a file here runs as transformers' module, over our cache, or is refused.

Refused with the reason, and before any weights are read.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from jubako.checkpoint.info import open_checkpoint
from jubako.config import JubakoConfig
from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.models import registry
from jubako.models.load import build_model, cache_layers, load_model
from jubako.models.registry import get_model_class, nearest_architectures
from jubako.models.transformers_fallback import TransformersForCausalLM

from .harness import PagedRunner, hf_config_of, make_config
from .sizes import SIZES, VOCAB, WINDOW, rope
from .tiny import reference_model

TOLERANCE = 1e-4
CPU = torch.device("cpu")

CONFIGS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2Config(**SIZES, n_inner=96, tie_word_embeddings=False),
    "gpt2 tied, scaled by layer": lambda: transformers.GPT2Config(
        **{**SIZES, "initializer_range": 0.1}, scale_attn_by_inverse_layer_idx=True
    ),
    "gpt-bigcode": lambda: transformers.GPTBigCodeConfig(**SIZES, n_inner=96, multi_query=True),
    "gpt-j": lambda: transformers.GPTJConfig(**SIZES, n_inner=96, rotary_dim=8),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**SIZES),
    "gpt-neox one after the other": lambda: transformers.GPTNeoXConfig(
        **SIZES, use_parallel_residual=False, rope_parameters=rope(partial_rotary_factor=0.5)
    ),
    "opt": lambda: transformers.OPTConfig(
        **SIZES, ffn_dim=96, word_embed_proj_dim=32, do_layer_norm_before=False
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(**SIZES, sliding_window=WINDOW),
    "gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=24, tie_word_embeddings=False),
    "glm": lambda: transformers.GlmConfig(**SIZES, head_dim=16),
    "helium": lambda: transformers.HeliumConfig(**SIZES, head_dim=16),
    "phi": lambda: transformers.PhiConfig(**SIZES),
    "cohere": lambda: transformers.CohereConfig(**SIZES, logit_scale=0.4),
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    "phimoe": lambda: transformers.PhimoeConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW
    ),
    "vaultgemma": lambda: transformers.VaultGemmaConfig(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=20,
        sliding_window=WINDOW,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=6.0,
    ),
    "gpt-oss, forced": lambda: transformers.GptOssConfig(
        **{**SIZES, "initializer_range": 0.15},
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
}

every_model = pytest.mark.parametrize("name", CONFIGS)


def class_of(config: Any) -> Any:
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


@cache
def reference(name: str) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model = class_of(config)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def config_of(hf_config: dict[str, Any], dtype: str = "float32", length: int = 256) -> JubakoConfig:
    config = make_config(hf_config, dtype, length)
    return config.replace(model_config={"model_impl": "transformers"})


def build(reference: Any, dtype: str = "float32") -> Any:
    return build_model(config_of(hf_config_of(reference), dtype), CPU)


@cache
def ours(name: str, dtype: str = "float32") -> Any:
    model = build(reference(name), dtype)
    model.load_weights(reference(name).state_dict().items())
    return model


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@torch.no_grad()
def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max().item() < TOLERANCE


class TestExact:
    @every_model
    @pytest.mark.parametrize("chunks", [[75], [1] * 25, [5, 1, 1, 30, 3, 1, 20, 14]])
    def test_any_chunking(self, name: str, chunks: list[int]) -> None:
        tokens = prompt(sum(chunks))
        runner = PagedRunner(ours(name), block_size=8)
        parts = []
        for size in chunks:
            start = runner.lengths[0]
            parts.append(runner.step({0: tokens[start : start + size]})[0])
        check(torch.cat(parts), logits_of(reference(name), tokens))

    @every_model
    def test_requests_share_steps(self, name: str) -> None:
        tokens = {r: prompt(length, seed=r) for r, length in enumerate((60, 33, 48))}
        runner = PagedRunner(ours(name), block_size=4)
        got: dict[int, list[torch.Tensor]] = {r: [] for r in tokens}
        for step in ({0: 30}, {0: 1, 1: 20}, {2: 40, 0: 1, 1: 1}, {2: 8, 0: 28, 1: 12}):
            chunks = {
                r: tokens[r][runner.lengths[r] : runner.lengths[r] + n] for r, n in step.items()
            }
            for r, logits in runner.step(chunks).items():
                got[r].append(logits)
        for r, parts in got.items():
            check(torch.cat(parts), logits_of(reference(name), tokens[r]))

    @every_model
    def test_greedy_tokens(self, name: str) -> None:
        prompts = {r: prompt(length, seed=7) for r, length in enumerate((3, 12, 41))}
        want = {}
        for r, tokens in prompts.items():
            out = reference(name).generate(
                torch.tensor([tokens]), max_new_tokens=24, do_sample=False, use_cache=True
            )
            want[r] = out[0, len(tokens) :].tolist()
        assert PagedRunner(ours(name)).generate(prompts, 24) == want

    @every_model
    def test_embeddings_may_replace_ids(self, name: str) -> None:
        model = ours(name)
        tokens = prompt(20)
        want = PagedRunner(model).step({0: tokens})[0]
        runner = PagedRunner(model)
        embedding = model.embed_input_ids(torch.tensor(tokens))
        runner.model = lambda ids, positions: model(None, positions, inputs_embeds=embedding)
        runner.model.compute_logits = model.compute_logits
        assert torch.equal(runner.step({0: tokens})[0], want)

    @pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "gemma", "olmoe", "vaultgemma"])
    def test_bfloat16_is_as_close_as_transformers(self, name: str) -> None:
        tokens = prompt(60)
        exact = logits_of(reference(name), tokens)
        rounded = type(reference(name))(CONFIGS[name]()).to(torch.bfloat16).eval()
        rounded.load_state_dict(reference(name).state_dict())
        theirs = (logits_of(rounded, tokens).float() - exact).square().mean(-1).sqrt().median()
        runner = PagedRunner(ours(name, "bfloat16"))
        logits = torch.cat([runner.step({0: part})[0] for part in (tokens[:40], tokens[40:])])
        error = (logits.float() - exact).square().mean(-1).sqrt().median()
        assert error <= 1.3 * theirs

    @pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3 windows", "mixtral"])
    def test_a_native_architecture_runs_both_ways(self, name: str) -> None:
        model = reference_model(name)
        forced = build(model)
        assert isinstance(forced, TransformersForCausalLM)
        forced.load_weights(model.state_dict().items())
        native = build_model(make_config(hf_config_of(model)), CPU)
        assert not isinstance(native, TransformersForCausalLM)
        native.load_weights(model.state_dict().items())
        prompts = {r: prompt(length) for r, length in enumerate((5, 40))}
        tokens = PagedRunner(forced).generate(prompts, 24)
        assert tokens == PagedRunner(native).generate(prompts, 24)


class TestCache:
    def test_a_layer_for_each_module_that_attends(self) -> None:
        layers = cache_layers(build(reference("gpt2")))
        assert list(layers) == [f"transformer.h.{i}.attn.attn" for i in range(4)]

    def test_windows_are_those_of_each_layer(self) -> None:
        layers = cache_layers(build(reference("vaultgemma")))
        types = reference("vaultgemma").config.layer_types
        want = [WINDOW if kind == "sliding_attention" else None for kind in types]
        assert [layer.sliding_window for layer in layers.values()] == want
        assert {layer.logits_soft_cap for layer in layers.values()} == {4.0}
        assert {layer.scale for layer in layers.values()} == {20**-0.5}

    def test_a_window_that_no_context_reaches_is_none(self) -> None:
        model = reference("starcoder2")
        short = build_model(config_of(hf_config_of(model), length=WINDOW), CPU)
        assert {layer.sliding_window for layer in cache_layers(short).values()} == {None}

    def test_one_key_head_is_kept_once(self) -> None:
        layers = cache_layers(build(reference("gpt-bigcode")))
        assert {layer.num_kv_heads for layer in layers.values()} == {1}


class TestWeights:
    @every_model
    def test_from_disk(self, name: str, tmp_path: Path) -> None:
        """There, tensors may have other names, and experts matrices of their own."""
        reference(name).save_pretrained(tmp_path)
        checkpoint = open_checkpoint(str(tmp_path))
        model = load_model(config_of(checkpoint.hf_config), checkpoint, CPU)
        want = dict(ours(name).named_parameters())
        got = dict(model.named_parameters())
        assert got.keys() == want.keys()
        for path in got:
            assert torch.equal(got[path], want[path]), path

    def test_names_may_lack_the_prefix(self) -> None:
        weights = reference("gpt2").state_dict()
        bare = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
        assert build(reference("gpt2")).load_weights(bare.items()) == bare.keys()

    def test_nothing_is_held_twice(self) -> None:
        weights = reference("gpt-neox").state_dict()
        model = build(reference("gpt-neox"))
        model.load_weights(weights.items())
        given = {tensor.data_ptr() for tensor in weights.values()}
        for path, parameter in model.named_parameters():
            assert parameter.data_ptr() in given, path
            assert not parameter.requires_grad

    def test_a_missing_tensor_is_named(self) -> None:
        weights = reference("gpt2").state_dict()
        del weights["transformer.h.2.attn.c_attn.bias"]
        with pytest.raises(CheckpointError, match=r"lacks.*transformer\.h\.2\.attn\.c_attn\.bias"):
            build(reference("gpt2")).load_weights(weights.items())

    def test_an_expert_that_is_missing_is_named(self, tmp_path: Path) -> None:
        reference("olmoe").save_pretrained(tmp_path)
        weights = transformers.modeling_utils.load_state_dict(tmp_path / "model.safetensors")
        name = "model.layers.1.mlp.experts.3.up_proj.weight"
        del weights[name]
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            build(reference("olmoe")).load_weights(weights.items())

    def test_an_extra_tensor_is_named(self) -> None:
        weights = {**reference("gpt2").state_dict(), "transformer.h.4.ln_1.weight": torch.zeros(64)}
        with pytest.raises(UnsupportedModelError, match=r"transformer\.h\.4\.ln_1\.weight"):
            build(reference("gpt2")).load_weights(weights.items())

    def test_a_misshapen_tensor_is_named_with_both_shapes(self) -> None:
        weights = reference("opt").state_dict()
        weights["model.decoder.layers.0.fc1.weight"] = torch.zeros(3)
        with pytest.raises(CheckpointError, match=r"fc1\.weight.*\[3\].*\[96, 64\]"):
            build(reference("opt")).load_weights(weights.items())

    def test_a_config_that_makes_no_model_is_a_fault_of_the_checkpoint(self) -> None:
        hf_config = {**hf_config_of(reference("gpt2")), "n_head": 3}
        with pytest.raises(CheckpointError, match="GPT2LMHeadModel"):
            build_model(config_of(hf_config), CPU)

    @pytest.mark.parametrize("count", [10**9, 0, -1, "x"])
    @pytest.mark.parametrize(
        ("model", "name"), [("gpt2", "n_layer"), ("olmoe", "num_hidden_layers")]
    )
    def test_no_number_of_layers_is_begun_with_that_nobody_has(
        self, model: str, name: str, count: Any
    ) -> None:
        hf_config = {**hf_config_of(reference(model)), name: count}
        with pytest.raises(CheckpointError, match=f"{name} in config.json must be an integer from"):
            build_model(config_of(hf_config), CPU)


def refused(config: Any, reason: str, **entries: Any) -> None:
    hf_config = config.to_dict() | {"architectures": [class_of(config).__name__]} | entries
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        build_model(config_of(hf_config), CPU)
    assert hf_config["architectures"][0] in str(error.value)


class TestRefused:
    def test_recurrent_states(self) -> None:
        refused(transformers.MambaConfig(num_hidden_layers=1), "recurrent state")
        refused(transformers.FalconH1Config(num_hidden_layers=1), "recurrent state")

    def test_layers_of_another_type(self) -> None:
        refused(transformers.MiniMaxConfig(num_hidden_layers=2), "linear_attention")

    def test_convolutions(self) -> None:
        config = transformers.Lfm2Config(**SIZES, layer_types=["conv"] + ["full_attention"] * 3)
        refused(config, "conv")

    def test_latent_attention(self) -> None:
        refused(transformers.MiniCPM3Config(**SIZES), "latent")

    def test_distance_biases(self) -> None:
        refused(transformers.BloomConfig(n_layer=1, hidden_size=64, n_head=4), "interface")
        refused(transformers.FalconConfig(num_hidden_layers=1, alibi=True), "alibi")

    def test_a_mask_of_its_own(self) -> None:
        refused(transformers.DogeConfig(**SIZES), "of its own to the scores")

    def test_tokens_that_see_what_follows(self) -> None:
        refused(transformers.BertConfig(**SIZES), "not causal")

    def test_a_module_that_attends_twice(self) -> None:
        refused(transformers.DiffLlamaConfig(**SIZES), "twice")

    def test_rotations_that_depend_on_the_batch(self) -> None:
        dynamic = rope(rope_type="dynamic", factor=2.0)
        refused(transformers.GlmConfig(**SIZES, head_dim=16, rope_parameters=dynamic), "dynamic")
        longrope = rope(
            rope_type="longrope",
            short_factor=[1.5] * 8,
            long_factor=[3.0] * 8,
            short_mscale=1.0,
            long_mscale=1.0,
            original_max_position_embeddings=128,
        )
        refused(
            transformers.PhimoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
            "longrope",
            rope_parameters=longrope,
        )

    def test_an_encoder_and_a_decoder(self) -> None:
        refused(transformers.BartConfig(), "an encoder and a decoder", is_encoder_decoder=True)

    def test_what_transformers_does_not_know(self) -> None:
        entries = {"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"}
        with pytest.raises(UnsupportedModelError, match="knows no causal model"):
            build_model(make_config(entries), CPU)

    def test_code_of_a_checkpoint_is_never_run(self) -> None:
        entries = {
            "architectures": ["NoSuchForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "modeling.NoSuchForCausalLM"},
        }
        with pytest.raises(UnsupportedModelError, match="never run"):
            build_model(make_config(entries), CPU)

    def test_pooling(self) -> None:
        with pytest.raises(UnsupportedModelError, match="do not pool"):
            get_model_class("GPT2Model", pools=True)


class TestChoice:
    def test_auto_takes_the_native_class(self) -> None:
        assert get_model_class("LlamaForCausalLM") is not TransformersForCausalLM
        assert get_model_class("GPT2LMHeadModel") is TransformersForCausalLM

    def test_native_refuses_what_it_has_not(self) -> None:
        with pytest.raises(UnsupportedModelError, match="model_impl=auto"):
            get_model_class("GPT2LMHeadModel", implementation="native")

    def test_transformers_is_asked_for_where_it_is_missing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(registry, "find_spec", lambda name: None)
        for implementation in ("auto", "transformers"):
            with pytest.raises(
                UnsupportedModelError, match=r"pip install 'jubako\[transformers\]'"
            ):
                get_model_class("GPT2LMHeadModel", implementation=implementation)
        assert get_model_class("LlamaForCausalLM") is not None

    def test_a_version_that_does_not_fit_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "jubako.models.transformers_fallback", None)
        with pytest.raises(UnsupportedModelError, match=r"does not fit.*pip install"):
            get_model_class("GPT2LMHeadModel")

    @pytest.mark.parametrize(
        ("architecture", "nearest"),
        [
            ("MambaForCausalLM", "Mamba2ForCausalLM"),
            ("Gemma4ForCausalLM", "Gemma2ForCausalLM"),
            ("PhiForCausalLM", "Phi3ForCausalLM"),
        ],
    )
    def test_the_nearest_are_named(self, architecture: str, nearest: str) -> None:
        assert nearest in nearest_architectures(architecture)
        with pytest.raises(UnsupportedModelError, match=nearest):
            get_model_class(architecture, implementation="native")

    def test_none_is_named_that_is_not_near(self) -> None:
        assert nearest_architectures("Qux") == ()
