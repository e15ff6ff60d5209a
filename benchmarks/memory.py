"""How much memory does an engine take beyond the libraries, against its weights and KV in use?

    python benchmarks/memory.py [--model M] [--dtype D] [--quantization Q] [--prompt-tokens N]
                                [--requests N]

A fresh process loads the libraries and the tokeniser only; others run the engine, core and front
end in one process. Resident memory of theirs, now (`VmRSS`) and at its peak since the process began
(`VmHWM`), less that of the first is what the engine takes. Mapped weights count as far as they are
resident, although engines share them. The weights are those that the model holds after loading,
each once; KV in use is that of the blocks that hold the requests' tokens. Both starts are measured:
one that prepares the weights, and one that finds them prepared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
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
from pathlib import Path
from jubako import LLM, SamplingParams
from jubako.worker import memory_budget
# The engine measures a step's peak by resetting it; what is measured here begins with the process.
memory_budget._CLEAR_REFS = Path("/nonexistent")
llm = LLM(**{engine!r})
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
    """Measure the starts one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=lambda path: str(Path(path).resolve()))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--quantization", default="none")
    args = vars(parser.parse_args())
    libraries = run(LIBRARIES.format(**args))
    assert isinstance(libraries, int)
    print(f"interpreter, PyTorch, tokeniser   {libraries / MIB:8.0f} MiB")
    options = {name: args[name] for name in ("model", "dtype", "quantization")}
    with tempfile.TemporaryDirectory() as folder:
        for start, cache in (
            ("weights prepared", "off"),
            (None, folder),
            ("weights found", folder),
        ):
            engine = run(ENGINE.format(**args, engine=options | {"weight_cache": cache}))
            assert isinstance(engine, dict)
            if start is not None:
                show(start, engine, libraries)


def show(start: str, engine: dict[str, int], libraries: int) -> None:
    """Print the parts of one start and their ratio."""
    print(start)
    for name in ("loaded_rss", "loaded_peak", "rss", "peak"):
        print(f"  engine: {name:<22}  {(engine[name] - libraries) / MIB:8.0f} MiB beyond that")
    needed = engine["weights"] + engine["kv"]
    print(f"  weights                         {engine['weights'] / MIB:8.0f} MiB")
    print(f"  KV written                      {engine['kv'] / MIB:8.0f} MiB")
    print(f"  peak over weights and KV        {(engine['peak'] - libraries) / needed:8.2f}")


if __name__ == "__main__":
    main()
