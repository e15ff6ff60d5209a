"""Whatever the default model writes for a schema satisfies it.

A sample here; `make structured-output` has all of them.
"""

from __future__ import annotations

import json
import os

import jsonschema

from jubako import LLM, SamplingParams
from jubako.sampling_params import StructuredOutputsParams
from tests.structured_output.schemas import Schema, make_schema

EVERYTHING = os.environ.get("JUBAKO_SCHEMAS") == "full"
COUNT = 200 if EVERYTHING else 20
MAX_TOKENS = 512

SCHEMAS = [make_schema(seed) for seed in range(COUNT)]


def check(schema: Schema, text: str) -> None:
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    validator.validate(json.loads(text))


def test_outputs_satisfy_their_schemas(gemma: LLM) -> None:
    prompts = [f"An example of the JSON schema {json.dumps(schema)}:" for schema in SCHEMAS]
    params = [
        SamplingParams(
            temperature=seed % 2,
            seed=seed,
            max_tokens=MAX_TOKENS,
            structured_outputs=StructuredOutputsParams(json=schema),
            truncate_prompt_tokens=200,
        )
        for seed, schema in enumerate(SCHEMAS)
    ]
    outputs = gemma.generate(prompts, params, use_tqdm=False)
    for schema, output in zip(SCHEMAS, outputs, strict=True):
        (answer,) = output.outputs
        assert answer.finish_reason == "stop", (schema, answer.text)
        check(schema, answer.text)
