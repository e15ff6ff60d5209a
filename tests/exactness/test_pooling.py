"""Models that pool: vectors and scores equal transformers' in float32, in every mode."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from jubako import LLM, PoolingParams
from jubako.errors import ConfigError, UnsupportedModelError, ValidationError

VOCAB = 200
TOLERANCE = 2e-5
"""On values of about 1; float32 sums in another order differ by less."""

ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "initializer_range": 0.2,
    "pad_token_id": 1,
    "hidden_act": "gelu",
}
DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": 48,
    "hidden_dim": 80,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 130,
    "initializer_range": 0.2,
    "pad_token_id": 1,
}
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 1,
    "eos_token_id": 2,
}

MODELS: dict[str, tuple[str, Callable[..., Any]]] = {
    "bert": ("Bert", lambda **k: transformers.BertConfig(**ENCODER, **k)),
    "roberta": ("Roberta", lambda **k: transformers.RobertaConfig(**ENCODER, **k)),
    "xlm-roberta": (
        "XLMRoberta",
        lambda **k: transformers.XLMRobertaConfig(**ENCODER, type_vocab_size=1, **k),
    ),
    "distilbert": ("DistilBert", lambda **k: transformers.DistilBertConfig(**DISTILBERT, **k)),
    "llama": ("Llama", lambda **k: transformers.LlamaConfig(**DECODER, **k)),
    "mistral": (
        "Mistral",
        lambda **k: transformers.MistralConfig(**DECODER, head_dim=12, sliding_window=40, **k),
    ),
    "qwen3": ("Qwen3", lambda **k: transformers.Qwen3Config(**DECODER, head_dim=16, **k)),
    "gemma3": (
        "Gemma3Text",
        lambda **k: transformers.Gemma3TextConfig(
            **DECODER,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=40,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            **k,
        ),
    ),
}
ENCODERS = ["bert", "roberta", "xlm-roberta", "distilbert"]
DECODERS = ["llama", "mistral", "qwen3", "gemma3"]


def prompts() -> list[list[int]]:
    """Lengths from 1 to 120, some of them twice; transformers treats the padding id apart."""
    rng = random.Random(3)
    lengths = [17, 1, 120, 2, 64, 33, 65, 17, 90, 16, 48, 5]
    return [[rng.randrange(5, VOCAB) for _ in range(length)] for length in lengths]


def make(name: str, ending: str, folder: Path, **entries: Any) -> tuple[Path, Any]:
    """A random model of the class `<family><ending>` as a folder, and the model."""
    stem, config = MODELS[name]
    if ending == "ForCausalLM":
        stem = stem.removesuffix("Text")
    torch.manual_seed(sum(name.encode()))
    model = getattr(transformers, stem + ending)(config(dtype="float32", **entries))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.eval().save_pretrained(folder)
    write_tokenizer(folder)
    return folder, model


def write_tokenizer(folder: Path) -> None:
    """One word a token; texts and pairs are framed as BERT's are."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="w3 $A w4",
        pair="w3 $A w4 $B:1 w4:1",
        special_tokens=[("w3", 3), ("w4", 4)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def start(folder: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_num_seqs": 8}
    return LLM(str(folder), **(defaults | options))


@pytest.fixture
def llm_of() -> Iterator[Callable[..., LLM]]:
    """Start engines that end with the test."""
    running: list[LLM] = []

    def begin(folder: Path, **options: Any) -> LLM:
        running.append(start(folder, **options))
        return running[-1]

    yield begin
    for llm in running:
        llm.shutdown()


@torch.inference_mode()
def hidden_states(model: Any, ids: list[int], **inputs: Any) -> torch.Tensor:
    """Transformers' final hidden states [tokens, hidden] of a prompt by itself."""
    base = getattr(model, model.base_model_prefix, model)
    hidden: torch.Tensor = base(torch.tensor([ids]), **inputs).last_hidden_state[0]
    return hidden


def assert_equal(got: Any, want: torch.Tensor, what: str) -> None:
    array = np.asarray(got, dtype=np.float32)
    assert array.shape == tuple(want.shape), what
    assert np.abs(array - want.numpy()).max() < TOLERANCE, what


POOLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "LAST": lambda hidden: hidden[-1],
    "CLS": lambda hidden: hidden[0],
    "MEAN": lambda hidden: hidden.mean(dim=0),
}


# -- embeddings -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_embeds_as_transformers_does(name, tmp_path, llm_of):
    folder, model = make(name, "Model", tmp_path)
    for pooling_type in ("CLS", "MEAN"):
        llm = llm_of(folder, pooling_type=pooling_type, normalize_embeddings=False)
        outputs = llm.embed(prompts())
        for ids, output in zip(prompts(), outputs, strict=True):
            want = POOLINGS[pooling_type](hidden_states(model, ids))
            assert output.prompt_token_ids == ids
            assert_equal(output.outputs.embedding, want, f"{pooling_type}, {len(ids)} tokens")


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("pooling_type", ["LAST", "MEAN", "CLS"])
def test_a_decoder_embeds_as_transformers_does(name, pooling_type, tmp_path, llm_of):
    folder, model = make(name, "ForCausalLM", tmp_path)
    llm = llm_of(folder, runner="pooling", pooling_type=pooling_type, block_size=16)
    for ids, output in zip(prompts(), llm.embed(prompts()), strict=True):
        want = F.normalize(POOLINGS[pooling_type](hidden_states(model, ids)), dim=0)
        assert_equal(output.outputs.embedding, want, f"{len(ids)} tokens")


def test_a_checkpoint_of_the_bare_decoder_embeds_by_itself(tmp_path, llm_of):
    folder, model = make("qwen3", "Model", tmp_path)
    llm = llm_of(folder)
    assert llm.llm_engine.ready.supported_tasks == ["embed", "token_embed"]
    (output,) = llm.embed(prompts()[5])
    want = F.normalize(hidden_states(model, prompts()[5])[-1], dim=0)
    assert_equal(output.outputs.embedding, want, "last token")


@pytest.mark.parametrize("budget", [8, 64])
def test_chunks_change_neither_the_last_token_nor_all_of_them(budget, tmp_path, llm_of):
    folder, model = make("gemma3", "ForCausalLM", tmp_path)
    llm = llm_of(folder, runner="pooling", block_size=16, max_num_batched_tokens=budget)
    last = llm.embed(prompts())
    every = llm.encode(prompts(), pooling_task="token_embed")
    for ids, one, all_ in zip(prompts(), last, every, strict=True):
        want = F.normalize(hidden_states(model, ids), dim=-1)
        assert_equal(one.outputs.embedding, want[-1], f"{len(ids)} tokens")
        assert_equal(all_.outputs.data, want, f"{len(ids)} tokens")


def test_a_cached_prefix_changes_nothing(tmp_path, llm_of):
    folder, model = make("qwen3", "ForCausalLM", tmp_path)
    llm = llm_of(folder, runner="pooling", block_size=16)
    ids = prompts()[2][:100]
    llm.embed(ids)
    (again,) = llm.embed(ids)
    assert again.num_cached_tokens == 96
    want = F.normalize(hidden_states(model, ids), dim=-1)
    assert_equal(again.outputs.embedding, want[-1], "last token")
    (every,) = llm.encode(ids, pooling_task="token_embed")
    assert every.num_cached_tokens == 0
    assert_equal(every.outputs.data, want, "every token")


@pytest.mark.parametrize("pooling_type", ["CLS", "MEAN"])
def test_a_pooling_of_whole_prompts_takes_nothing_from_the_cache(pooling_type, tmp_path, llm_of):
    folder, model = make("qwen3", "ForCausalLM", tmp_path)
    llm = llm_of(folder, runner="pooling", pooling_type=pooling_type, block_size=16)
    ids = prompts()[2]
    want = F.normalize(POOLINGS[pooling_type](hidden_states(model, ids)), dim=0)
    for _ in range(2):
        (output,) = llm.embed(ids)
        assert output.num_cached_tokens == 0
        assert_equal(output.outputs.embedding, want, pooling_type)


def test_preemption_changes_nothing(tmp_path, llm_of):
    folder, model = make("llama", "ForCausalLM", tmp_path)
    # Reservation off: requests are admitted that cannot all finish, and take each other's blocks.
    llm = llm_of(
        folder,
        runner="pooling",
        block_size=4,
        num_gpu_blocks_override=66,
        max_num_batched_tokens=16,
        scheduler_reserve_full_isl=False,
    )
    long = [[*prompts()[2][first:], *prompts()[4]] for first in range(0, 96, 12)]
    every = llm.encode(long, pooling_task="token_embed")
    for ids, output in zip(long, every, strict=True):
        want = F.normalize(hidden_states(model, ids), dim=-1)
        assert_equal(output.outputs.data, want, f"{len(ids)} tokens")
    assert llm.get_metrics()["num_preemptions"] > 0


def test_dimensions_cut_the_vector_before_it_is_normalised(tmp_path, llm_of):
    folder, model = make("bert", "Model", tmp_path, matryoshka_dimensions=[8, 16])
    llm = llm_of(folder, pooling_type="MEAN")
    ids = prompts()[3]
    (output,) = llm.embed(ids, PoolingParams(dimensions=16))
    want = F.normalize(hidden_states(model, ids).mean(dim=0)[:16], dim=0)
    assert_equal(output.outputs.embedding, want, "16 dimensions")
    with pytest.raises(ValidationError, match="8, 16"):
        llm.embed(ids, PoolingParams(dimensions=17))


# -- labels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
@pytest.mark.parametrize("labels", [1, 3])
def test_a_classifier_scores_as_transformers_does(name, labels, tmp_path, llm_of):
    folder, model = make(name, "ForSequenceClassification", tmp_path, num_labels=labels)
    llm = llm_of(folder, block_size=16)
    some = prompts()
    raw = llm.classify(some, PoolingParams(use_activation=False))
    probs = llm.classify(some)
    for ids, logits, prob in zip(some, raw, probs, strict=True):
        with torch.inference_mode():
            want = model(torch.tensor([ids])).logits[0]
        assert_equal(logits.outputs.probs, want, f"logits of {len(ids)} tokens")
        activated = torch.sigmoid(want) if labels == 1 else want.softmax(-1)
        assert_equal(prob.outputs.probs, activated, f"probabilities of {len(ids)} tokens")


@pytest.mark.parametrize("name", ["bert", "distilbert", "llama"])
def test_a_token_classifier_scores_every_token(name, tmp_path, llm_of):
    folder, model = make(name, "ForTokenClassification", tmp_path, num_labels=4)
    llm = llm_of(folder, block_size=16)
    assert llm.llm_engine.ready.supported_tasks == ["token_classify"]
    for ids, output in zip(prompts(), llm.encode(prompts()), strict=True):
        with torch.inference_mode():
            want = model(torch.tensor([ids])).logits[0].softmax(-1)
        assert_equal(output.outputs.data, want, f"{len(ids)} tokens")


def test_a_cross_encoder_tells_the_two_texts_apart(tmp_path, llm_of):
    folder, model = make("bert", "ForSequenceClassification", tmp_path, num_labels=1)
    llm = llm_of(folder)
    texts = ["w10 w11 w12", "w13", "w14 w15 w16 w17 w18 w19"]
    outputs = llm.score("w20 w21", texts)
    for text, output in zip(texts, outputs, strict=True):
        second = [int(word[1:]) for word in text.split()]
        ids = [3, 20, 21, 4, *second, 4]
        types = [0] * 4 + [1] * (len(second) + 1)
        assert output.prompt_token_ids == ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
        assert abs(output.outputs.score - float(torch.sigmoid(logits[0, 0]))) < TOLERANCE
    # A pair is cut where it is longest, and keeps its frame.
    (cut,) = llm.score(
        "w20 w21", "w30 " * 300, pooling_params=PoolingParams(truncate_prompt_tokens=9)
    )
    assert cut.prompt_token_ids == [3, 20, 21, 4, 30, 30, 30, 30, 4]


@pytest.mark.parametrize("process", [False, True])
def test_a_reward_model_scores_tokens_through_two_matrices(process, tmp_path, llm_of):
    folder, model = make("qwen3", "ForCausalLM", tmp_path)
    labels = 2 if process else 1
    weights = {n: t for n, t in model.state_dict().items() if not n.startswith("lm_head")}
    for i, (rows, columns) in ((0, (48, 48)), (2, (labels, 48))):
        weights[f"score.{i}.weight"] = torch.randn(rows, columns)
        weights[f"score.{i}.bias"] = torch.randn(rows)
    from safetensors.torch import save_file

    save_file({n: t.contiguous() for n, t in weights.items()}, folder / "model.safetensors")
    ending = "ForProcessRewardModel" if process else "ForRewardModel"
    change_config(folder, architectures=["Qwen3" + ending], id2label=None)
    llm = llm_of(folder, block_size=16, max_num_batched_tokens=16)
    ids = [*range(10, 20), 7, *range(30, 50), 7]
    params = PoolingParams(step_tag_id=7) if process else None
    (output,) = llm.reward(ids, params)
    hidden = hidden_states(model, ids)
    dense = torch.relu(F.linear(hidden, weights["score.0.weight"], weights["score.0.bias"]))
    want = F.linear(dense, weights["score.2.weight"], weights["score.2.bias"])
    if process:
        want = want.softmax(-1)[[i for i, token in enumerate(ids) if token == 7]]
    scale = float(want.abs().max())
    assert_equal(output.outputs.data / scale, want / scale, "rewards")


# -- folders of sentence-transformers -----------------------------------------------------------


def change_config(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def write_modules(folder: Path, mode: str, *more: str, max_seq_length: int = 20) -> None:
    kinds = ["Transformer", "Pooling", *more]
    paths = ["", "1_Pooling", *(f"{i}_{kind}" for i, kind in enumerate(more, 2))]
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {
                    "idx": i,
                    "name": str(i),
                    "path": path,
                    "type": f"sentence_transformers.models.{k}",
                }
                for i, (k, path) in enumerate(zip(kinds, paths))
            ]
        )
    )
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{m}": m == mode for m in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": max_seq_length, "do_lower_case": False})
    )


@pytest.mark.parametrize("normalize", [False, True])
def test_the_modules_of_a_folder_are_obeyed(normalize, tmp_path, llm_of):
    folder, model = make("bert", "Model", tmp_path)
    write_modules(folder, "mean_tokens", *(["Normalize"] if normalize else []))
    llm = llm_of(folder)
    assert llm.llm_engine.ready.max_model_len == 20
    (output,) = llm.embed("w5 w6 w7")
    want = hidden_states(model, [3, 5, 6, 7, 4]).mean(dim=0)
    assert_equal(output.outputs.embedding, F.normalize(want, dim=0) if normalize else want, "")
    with pytest.raises(ValidationError, match="20"):
        llm.embed("w5 " * 19)
    (cut,) = llm.embed("w5 " * 19, PoolingParams(truncate_prompt_tokens=-1))
    assert cut.prompt_token_ids == [3, *[5] * 18, 4]


def test_a_decoder_with_modules_embeds_unless_text_is_asked_for(tmp_path, llm_of):
    folder, model = make("qwen3", "ForCausalLM", tmp_path)
    write_modules(folder, "lasttoken", "Normalize", max_seq_length=100)
    (output,) = llm_of(folder).embed([5, 6, 7])
    want = F.normalize(hidden_states(model, [5, 6, 7])[-1], dim=0)
    assert_equal(output.outputs.embedding, want, "last token")
    assert llm_of(folder, runner="generate").generate([[5, 6, 7]])[0].outputs[0].token_ids


def test_a_module_that_is_not_built_is_named(tmp_path, llm_of):
    folder, _ = make("bert", "Model", tmp_path)
    write_modules(folder, "mean_tokens", "Dense")
    with pytest.raises(UnsupportedModelError, match="Dense"):
        llm_of(folder)


# -- what cannot be -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"enable_prefix_caching": True}, "enable_prefix_caching"),
        ({"max_num_batched_tokens": 64}, "max_num_batched_tokens=64"),
        ({"runner": "generate"}, "runner=generate"),
        ({"max_model_len": 131}, "130"),
        ({"async_scheduling": True}, "async_scheduling"),
    ],
)
def test_an_encoder_refuses_options_that_it_cannot_honour(options, match, tmp_path, llm_of):
    folder, _ = make("bert", "Model", tmp_path)
    with pytest.raises(ConfigError, match=match):
        llm_of(folder, **options)


def test_entries_that_change_the_attention_are_refused(tmp_path, llm_of):
    folder, _ = make("llama", "Model", tmp_path)
    change_config(folder, is_causal=False)
    with pytest.raises(UnsupportedModelError, match="is_causal"):
        llm_of(folder)


def test_a_pooling_model_writes_no_text_and_a_writer_pools_nothing(tmp_path, llm_of):
    folder, _ = make("llama", "ForCausalLM", tmp_path)
    writer = llm_of(folder)
    with pytest.raises(ValidationError, match="runner=pooling") as refused:
        writer.embed([5])
    assert refused.value.code == "unsupported_task"
    pooler = llm_of(folder, runner="pooling")
    with pytest.raises(ValidationError, match="writes no text"):
        pooler.generate([[5]])
    with pytest.raises(ValidationError, match="cannot be asked to classify"):
        pooler.classify([5])
    # Both still work.
    assert len(pooler.embed([5])[0].outputs.embedding) == 48
    assert writer.generate([[5]])[0].finished
