"""A tiny random Whisper that writes bytes, as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import WhisperConfig, WhisperForConditionalGeneration

LENGTH = 24
"""Positions of the decoder, prompt and answer together."""

SPECIAL = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startofprev|>",
    "<|notimestamps|>",
]
END, START, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_TIMES = range(256, 256 + len(SPECIAL))
ZERO = NO_TIMES + 1
VOCABULARY = ZERO + 1501
SUPPRESSED, NOT_FIRST = [*range(40), START, EN, DE], [END]


def tokenizer() -> Tokenizer:
    """A token a byte, and the special ones. Times are ids without a token, as in real files."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return made


def make(folder: Path) -> Path:
    """Write the model, its tokeniser and its lists of suppressed tokens into `folder`."""
    torch.manual_seed(3)
    config = WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=80, d_model=32, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, max_source_positions=1500, max_target_positions=LENGTH, init_std=0.4,
        pad_token_id=END, bos_token_id=END, eos_token_id=END, decoder_start_token_id=START,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        # There are many times: each is less likely, so that there is text as well.
        model.model.decoder.embed_tokens.weight[ZERO:] *= 0.3
    model.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    generation = {
        "eos_token_id": END,
        "decoder_start_token_id": START,
        "is_multilingual": True,
        "suppress_tokens": SUPPRESSED,
        "begin_suppress_tokens": NOT_FIRST,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
