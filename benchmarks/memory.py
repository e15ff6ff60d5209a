"""How much memory does an engine take beyond the libraries, against its weights and KV in use?

    python benchmarks/memory.py [--model M] [--dtype D] [--prompt-tokens N] [--requests N]

A fresh process loads the libraries and the tokeniser only; another runs the engine. Peak resident
memory of the second less the first is what the engine takes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

MIB = 1 << 20

STATUS = """
import re
def resident(field):
    return int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
"""

LIBRARIES = (
    STATUS
    + """
import numpy, torch, tokenizers, msgspec, json
from jubako.checkpoint.info import open_checkpoint
from jubako.frontend.tokenizer import load_tokenizer
tokenizer = load_tokenizer(open_checkpoint({model!r}))
torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))
print(json.dumps(resident("VmRSS")))
"""
)

ENGINE = (
    STATUS
    + """
import json, random
from jubako import LLM, SamplingParams
llm = LLM(model={model!r}, dtype={dtype!r})
loaded = resident("VmRSS"), resident("VmHWM")
core = llm.llm_engine.client.core
model = core.executor.worker.model_runner.model
weights = sum(
    t.numel() * t.element_size()
    for t in {{p.data_ptr(): p for p in model.parameters() if p.numel()}}.values()
)
packed = [getattr(layer, "packed", None) for layer in model.modules()]
weights += sum(p.num_bytes for p in {{id(p): p for p in packed if p is not None}}.values())
rng = random.Random(0)
prompts = [
    [2] + [rng.randrange(1000, 2000) for _ in range({prompt_tokens} - 1)] for _ in range({requests})
]
llm.generate(prompts, SamplingParams(max_tokens=64, temperature=0, ignore_eos=True), use_tqdm=False)
pool = core.scheduler.kv_cache_manager.block_pool
written = sum(1 for block in pool.blocks if block.block_hash is not None)
groups = core.scheduler.kv_cache_config.kv_cache_groups
page = {{g.kv_cache_spec.page_size_bytes * len(g.layer_names) for g in groups}}
print(json.dumps(dict(
    loaded_rss=loaded[0], loaded_peak=loaded[1], rss=resident("VmRSS"), peak=resident("VmHWM"),
    weights=weights, kv=written * max(page),
)))
llm.shutdown()
"""
)


def run(code: str) -> object:
    """What a fresh interpreter prints as JSON."""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the parts and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=lambda path: str(Path(path).resolve()))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--requests", type=int, default=4)
    args = vars(parser.parse_args())
    libraries = run(LIBRARIES.format(**args))
    engine = run(ENGINE.format(**args))
    assert isinstance(libraries, int)
    assert isinstance(engine, dict)
    print(f"interpreter, PyTorch, tokeniser  {libraries / MIB:8.0f} MiB")
    for name in ("loaded_rss", "loaded_peak", "rss", "peak"):
        print(f"engine: {name:<24} {(engine[name] - libraries) / MIB:8.0f} MiB beyond that")
    needed = engine["weights"] + engine["kv"]
    print(f"weights                          {engine['weights'] / MIB:8.0f} MiB")
    print(f"KV written                       {engine['kv'] / MIB:8.0f} MiB")
    print(f"peak over weights and KV         {(engine['peak'] - libraries) / needed:8.2f}")


if __name__ == "__main__":
    main()
