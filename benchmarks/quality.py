"""What do fewer bits cost: how much less likely does a model find a text that people wrote?

    python benchmarks/quality.py [--model M] --quantization int8,int4 [--kv-cache-dtype int8,fp8]

Perplexity is the exponential of the mean negative log-likelihood of a token. The text, a novel's
beginning, is cut into pieces of `--length` tokens, each of which is a prompt of its own, so the
engine computes it as it would compute any; the first token of a piece is not scored. Weights in
float32 and in bfloat16 are measured beside the forms that are asked for. The table has each
perplexity and its ratio to both, in percent, with the standard error of that ratio: pieces are
compared one by one with the same pieces of bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

from jubako import LLM, SamplingParams

TEXT = Path(__file__).parent / "texts" / "northanger_abbey.txt"


class Form(NamedTuple):
    """How weights and the KV cache are held."""

    dtype: str
    quantization: str = "none"
    kv_cache_dtype: str = "auto"

    def __str__(self) -> str:
        weights = self.dtype if self.quantization == "none" else self.quantization
        return weights if self.kv_cache_dtype == "auto" else f"{weights}, KV {self.kv_cache_dtype}"


BASELINES = (Form("float32"), Form("bfloat16"))


def likelihoods(form: Form, args: argparse.Namespace) -> list[list[float]]:
    """The log-likelihood of each scored token, piece by piece."""
    options: dict[str, Any] = {}
    if form.kv_cache_dtype != "auto":
        options["kv_cache_dtype"] = form.kv_cache_dtype
    llm = LLM(
        args.model,
        dtype=form.dtype,
        quantization=form.quantization,
        max_model_len=args.length + 1,
        max_num_batched_tokens=args.length,
        max_num_seqs=1,
        num_threads=args.num_threads,
        log_level="warning",
        **options,
    )
    try:
        ids = llm.get_tokenizer().encode(TEXT.read_text())
        start, ids = ids[:1], ids[1:]
        size = args.length - len(start)
        pieces = [[*start, *ids[i : i + size]] for i in range(0, len(ids), size)]
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        outputs = llm.generate(pieces[: args.pieces], params, use_tqdm=False)
    finally:
        llm.shutdown()
    return [
        [scores[token].logprob for token, scores in zip(piece[2:], output.prompt_logprobs[2:])]
        for piece, output in zip(pieces, outputs)
    ]


def ratio(ours: list[list[float]], base: list[list[float]]) -> tuple[float, float]:
    """Perplexity over the baseline's, less 1, in percent, and its standard error."""
    gains = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(ours, base, strict=True)]
    tokens = [gain for piece in gains for gain in piece]
    change = 100 * math.expm1(statistics.fmean(tokens))
    means = [statistics.fmean(piece) for piece in gains]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan
    return change, 100 * error


def perplexity(scores: list[list[float]]) -> float:
    """Of all pieces together."""
    return math.exp(-statistics.fmean(score for piece in scores for score in piece))


def main() -> int:
    """Print the table; 1 if `--limit` is given and a form is worse by more than it allows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="A folder or file (default: the default model).")
    parser.add_argument("--quantization", default="", metavar="NAME[,NAME]")
    parser.add_argument("--kv-cache-dtype", default="", metavar="NAME[,NAME]")
    parser.add_argument("--length", type=int, default=1024, help="Tokens of a piece.")
    parser.add_argument("--pieces", type=int, help="Only the first pieces of the text.")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--limit", type=float, metavar="PERCENT", help="More is a failure.")
    parser.add_argument("--output", type=Path, metavar="FILE", help="Write the figures as JSON.")
    args = parser.parse_args()
    forms = list(BASELINES)
    forms += [Form("bfloat16", name) for name in args.quantization.split(",") if name]
    forms += [Form("bfloat16", "none", name) for name in args.kv_cache_dtype.split(",") if name]
    scores = {}
    failed = False
    report = []
    print(f"{'form':<24}{'perplexity':>12}{'to float32':>13}{'to bfloat16':>13}{'± error':>18}")
    for form in forms:
        scores[form] = likelihoods(form, args)
        row: dict[str, Any] = {"form": str(form), "perplexity": perplexity(scores[form])}
        line = f"{form!s:<24}{row['perplexity']:>12.4f}"
        for base in BASELINES:
            if base in scores:
                row[f"to_{base}"], row["error"] = ratio(scores[form], scores[base])
                line += f"{row[f'to_{base}']:>+12.3f}%"
        if form not in BASELINES:
            line += f"{row['error']:>17.3f}%"
            failed |= args.limit is not None and row["to_bfloat16"] > args.limit
        print(line, flush=True)
        report.append(row)
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
