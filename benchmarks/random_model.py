"""A model of a usual shape with random weights, to measure speed beyond the default model.

    python benchmarks/random_model.py FOLDER --tokenizer MODEL_FOLDER

Writes a Hugging Face folder in bfloat16 with the shape of Qwen 2.5 0.5B: 24 layers of 896, 14 query
and 2 key-value heads of 64, 4,864 in the MLP, 151,936 tokens, tied. The tokeniser is copied from
another model's folder, since every engine asks for one; benchmarks give token ids. What such a
model writes means nothing, and how fast it does so depends on shapes alone. Needs transformers.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="MODEL_FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=1,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(args.folder)
    for name in TOKENIZER_FILES:
        if (args.tokenizer / name).exists():
            shutil.copy(args.tokenizer / name, args.folder / name)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters in {args.folder}")


if __name__ == "__main__":
    main()
