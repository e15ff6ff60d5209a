"""Encoder-decoder models give transformers' logits, whoever shares their steps."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from jubako.errors import CheckpointError, UnsupportedModelError
from jubako.layers.cross_attention import CrossAttention
from jubako.layers.forward_context import set_forward_context
from jubako.models.load import build_model, cache_layers
from tests.kernels.paging import make_metadata
from tests.kernels.test_cross_attention import BLOCK, cross_metadata

from . import families
from .harness import from_transformers, hf_config_of, make_config
from .sizes import VOCAB

TOLERANCE = 1e-4
CONFIGS = families.collect("ENCODER_DECODERS")
every_model = pytest.mark.parametrize("name", CONFIGS)

Weights = dict[str, torch.Tensor]


def reference_model(name: str) -> Any:
    """The transformers model, float32, with nothing at its default."""
    model_class, config = CONFIGS[name]
    torch.manual_seed(0)
    model = model_class(config())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for path, buffer in model.named_buffers():
            if path.endswith("logits_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    return model.eval()


@cache
def pair(name: str) -> tuple[Any, Any]:
    reference = reference_model(name)
    return reference, from_transformers(reference)


def encoder_input(reference: Any, seed: int) -> Weights:
    """An input of one request, of another size for every text."""
    generator = torch.Generator().manual_seed(seed)
    config = reference.config
    if hasattr(config, "num_mel_bins"):
        shape = (config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": torch.randn(shape, generator=generator)}
    length = (1, 9, 40, 3)[seed % 4]
    return {"input_ids": torch.randint(3, VOCAB, (length,), generator=generator)}


def decoder_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@torch.no_grad()
def logits_of(reference: Any, given: Weights, tokens: list[int]) -> torch.Tensor:
    batch = {
        name: x[None].to(reference.dtype if x.is_floating_point() else x.dtype)
        for name, x in given.items()
    }
    out = reference(**batch, decoder_input_ids=torch.tensor([tokens]), use_cache=False)
    return out.logits[0].float()


class PagedRunner:
    """Requests with an encoder input each; pages hold NaN wherever nothing has been written."""

    def __init__(self, model: Any, num_blocks: int = 300) -> None:
        self.model = model
        self.layers = cache_layers(model)
        for layer in self.layers.values():
            page = layer.get_kv_cache_spec(BLOCK).page_size_bytes
            layer.bind_kv_cache(torch.full((num_blocks, page), -1, dtype=torch.int8), BLOCK)
        self.free: list[int] = np.random.default_rng(0).permutation(num_blocks).tolist()
        self.own: dict[int, list[int]] = {}
        self.cross: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.encoded: dict[int, int] = {}

    @torch.inference_mode()
    def step(
        self, chunks: dict[int, list[int]], given: dict[int, Weights] | None = None
    ) -> dict[int, torch.Tensor]:
        """Run the tokens of each request, and the encoder for those in `given`; their logits."""
        rows = list(chunks)
        new = [r for r in rows if given and r in given]
        outputs = self.model.encode([given[r] for r in new]) if given else None
        for r, output in zip(new, outputs or ()):
            self.own[r], self.lengths[r], self.encoded[r] = [], 0, len(output)
            self.cross[r] = [self.free.pop() for _ in range(-(-len(output) // BLOCK))]
        starts = {r: self.lengths[r] for r in rows}
        for r, tokens in chunks.items():
            self.lengths[r] += len(tokens)
            while len(self.own[r]) * BLOCK < self.lengths[r]:
                self.own[r].append(self.free.pop())
        sizes = [len(tokens) for tokens in chunks.values()]
        own = make_metadata(
            sizes, [self.lengths[r] for r in rows], [self.own[r] for r in rows], BLOCK
        )
        cross = cross_metadata(
            sizes,
            [self.encoded[r] for r in rows],
            [self.cross[r] for r in rows],
            [rows.index(r) for r in new],
        )
        context = {
            name: cross if isinstance(layer, CrossAttention) else own
            for name, layer in self.layers.items()
        }
        ids = torch.tensor([t for tokens in chunks.values() for t in tokens], dtype=torch.int32)
        positions = torch.cat([torch.arange(starts[r], self.lengths[r]) for r in rows])
        with set_forward_context(context):
            hidden = self.model(ids, positions, encoder_outputs=outputs)
        return dict(zip(rows, self.model.compute_logits(hidden).split(sizes)))


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max().item() < TOLERANCE


@every_model
def test_the_encoder(name: str) -> None:
    reference, model = pair(name)
    given = [encoder_input(reference, seed) for seed in range(4)]
    with torch.no_grad():
        outputs = model.encode(given)
        for item, output in zip(given, outputs, strict=True):
            batch = {key: x[None] for key, x in item.items()}
            check(output, reference.model.encoder(**batch).last_hidden_state[0])


@every_model
def test_steps_that_requests_share(name: str) -> None:
    """Some begin while others write, in any order of rows."""
    reference, model = pair(name)
    given = {r: encoder_input(reference, r) for r in range(4)}
    tokens = {r: decoder_prompt(n, r) for r, n in enumerate((30, 25, 7, 40))}
    runner = PagedRunner(model)
    got: dict[int, list[torch.Tensor]] = {r: [] for r in tokens}
    schedule = [
        ({1: 20}, [1]),
        ({0: 3, 1: 1, 2: 1}, [0, 2]),
        ({2: 1, 1: 1, 0: 1, 3: 37}, [3]),
        *[({3: 1, 0: 1, 1: 1, 2: 1}, [])] * 3,
        ({0: 23}, []),
        ({2: 2}, []),
    ]
    for sizes, beginning in schedule:
        chunks = {}
        for r, size in sizes.items():
            start = 0 if r in beginning else runner.lengths[r]
            chunks[r] = tokens[r][start : start + size]
        for r, logits in runner.step(chunks, {r: given[r] for r in beginning}).items():
            got[r].append(logits)
    for r, parts in got.items():
        assert runner.lengths[r] == len(tokens[r])
        check(torch.cat(parts), logits_of(reference, given[r], tokens[r]))


@every_model
def test_the_encoder_matters(name: str) -> None:
    """A guard of this file: the tiny models would show an input that is another request's."""
    reference, _ = pair(name)
    tokens = decoder_prompt(6, 0)
    one, other = (logits_of(reference, encoder_input(reference, s), tokens) for s in (1, 2))
    assert (one - other).abs().amax(-1).min() > 100 * TOLERANCE


@every_model
def test_bfloat16_is_as_close_as_transformers(name: str) -> None:
    reference, _ = pair(name)
    tokens, given = decoder_prompt(60, 0), encoder_input(reference, 2)
    exact = logits_of(reference, given, tokens)
    rounded = reference_model(name).to(torch.bfloat16)
    theirs = (logits_of(rounded, given, tokens) - exact).square().mean(-1).sqrt().median()
    runner = PagedRunner(from_transformers(reference, "bfloat16"))
    parts = [runner.step({0: tokens[:40]}, {0: given})[0], runner.step({0: tokens[40:]})[0]]
    ours = (torch.cat(parts).float() - exact).square().mean(-1).sqrt().median()
    assert ours <= 1.3 * theirs


# -- weights ----------------------------------------------------------------------------------


def empty_model(reference: Any) -> Any:
    return build_model(make_config(hf_config_of(reference)), torch.device("cpu"))


def assert_loads(reference: Any, weights: Weights) -> None:
    """`weights` give the model that all of the reference's give."""
    model = empty_model(reference)
    model.load_weights(weights.items())
    want = dict(from_transformers(reference).named_parameters())
    got = dict(model.named_parameters())
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


@every_model
def test_order_and_prefix_do_not_matter(name: str) -> None:
    reference = reference_model(name)
    weights = {n.removeprefix("model."): t for n, t in reference.state_dict().items()}
    assert_loads(reference, dict(reversed(weights.items())))


@every_model
def test_biases_of_keys_that_are_missing_are_zero(name: str) -> None:
    reference = reference_model(name)
    weights = reference.state_dict()
    for key in list(weights):
        if key.endswith("k_proj.bias"):
            weights[key] = torch.zeros_like(weights[key])
    zeros = {key: t for key, t in weights.items() if not key.endswith("k_proj.bias")}
    model, want = empty_model(reference), empty_model(reference)
    model.load_weights(zeros.items())
    if "whisper" in name:  # it has none: nothing to compare with
        bias = model.model.decoder.layers[0].encoder_attn.kv_proj.bias
        assert not bias[:64].any()
        assert bias[64:].all()
        return
    want.load_weights(weights.items())
    for parameter, other in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(parameter, other)


@pytest.mark.parametrize(
    "kept", ["model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens"]
)
def test_one_of_the_tied_embeddings_is_enough(kept: str) -> None:
    reference = reference_model("bart tied, scaled")
    others = ("model.shared.", "embed_tokens.", "lm_head.")
    weights = {
        name: tensor
        for name, tensor in reference.state_dict().items()
        if name.startswith(kept) or not any(other in name for other in others)
    }
    assert_loads(reference, weights)
    del weights[f"{kept}.weight"]
    with pytest.raises(CheckpointError, match=r"model\.shared\.weight"):
        empty_model(reference).load_weights(weights.items())


def test_without_a_bias_of_logits_there_is_none() -> None:
    reference = reference_model("bart")
    reference.final_logits_bias.zero_()
    weights = reference.state_dict()
    del weights["final_logits_bias"]
    assert_loads(reference, weights)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("bart", "model.decoder.layers.1.encoder_attn.v_proj.bias"),
        ("bart", "model.encoder.layernorm_embedding.weight"),
        ("bart", "lm_head.weight"),
        ("whisper", "model.encoder.conv2.bias"),
        ("whisper", "model.decoder.embed_positions.weight"),
        ("whisper", "proj_out.weight"),
    ],
)
def test_what_does_not_fit_is_named(name: str, tensor: str) -> None:
    reference = reference_model(name)
    weights = reference.state_dict()
    pattern = tensor.replace(".", r"\.")
    for wrong, error in (
        ({tensor: torch.zeros(3)}, CheckpointError),
        ({tensor.replace("weight", "wait").replace("bias", "buyers"): torch.zeros(3)}, None),
    ):
        with pytest.raises(error or UnsupportedModelError, match=r"wait|buyers|" + pattern):
            empty_model(reference).load_weights({**weights, **wrong}.items())
    del weights[tensor]
    with pytest.raises(CheckpointError, match=f"lacks.*{pattern}"):
        empty_model(reference).load_weights(weights.items())


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"decoder_attention_heads": 5}, "decoder_attention_heads=5"),
        ({"activation_function": "mish"}, "'mish'"),
        ({"encoder_layers": 0}, "encoder_layers"),
        ({"d_model": "wide"}, "d_model"),
    ],
)
@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_settings_that_cannot_be_honoured(name: str, entries: dict[str, Any], named: str) -> None:
    hf_config = hf_config_of(reference_model(name)) | entries
    with pytest.raises((CheckpointError, UnsupportedModelError), match=named):
        build_model(make_config(hf_config), torch.device("cpu"))
