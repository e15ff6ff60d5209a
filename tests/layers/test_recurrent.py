"""Recurrent layers find their states: which blocks a step reads and writes, and where they lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jubako.config import JubakoConfig
from jubako.errors import ConfigError
from jubako.kv_cache.specs import MambaSpec
from jubako.layers.forward_context import set_forward_context
from jubako.layers.recurrent import RecurrentLayer, make_state_slots, state_dtype
from tests.kernels.paging import make_metadata

TABLES = [[11, 12, 13, 14], [21, 22, 23, 24], [31, 32, 33, 34]]


def slots_of(mode: str, steps: list[tuple[int, int]], block_size: int = 4):
    """Of requests that have `computed` tokens and compute `count` more."""
    counts = [count for _, count in steps]
    ends = [computed + count for computed, count in steps]
    metadata = make_metadata(counts, ends, TABLES[: len(steps)], block_size)
    return make_state_slots(metadata, block_size, mode)


def writes(slots) -> list[tuple[int, int, int]]:
    return list(
        zip(
            slots.write_requests.tolist(),
            slots.write_tokens.tolist(),
            slots.write_blocks.tolist(),
            strict=True,
        )
    )


def test_without_caching_a_request_has_one_block() -> None:
    slots = slots_of("none", [(0, 9), (5, 1)])
    assert slots.read_blocks.tolist() == [-1, 21]
    assert writes(slots) == [(0, 8, 11), (1, 9, 21)]


def test_aligned_states_move_with_the_last_token() -> None:
    slots = slots_of("align", [(0, 8), (8, 1), (5, 2)])
    assert slots.read_blocks.tolist() == [-1, 22, 32]
    assert writes(slots) == [(0, 7, 12), (1, 8, 23), (2, 10, 32)]


def test_every_border_that_a_step_passes_is_kept() -> None:
    slots = slots_of("all", [(0, 9), (7, 1), (4, 8)])
    assert slots.read_blocks.tolist() == [-1, 22, 31]
    assert writes(slots) == [
        (0, 3, 11),
        (0, 7, 12),
        (0, 8, 13),
        (1, 9, 22),
        (2, 13, 32),
        (2, 17, 33),
    ]


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_any_chunking_reads_what_was_written_last(mode: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        computed, last = 0, -1
        while computed < 16:
            count = int(rng.integers(1, 17 - computed))
            slots = slots_of(mode, [(computed, count)])
            assert slots.read_blocks.tolist() == [last]
            assert len(set(slots.write_blocks.tolist())) == len(slots.write_blocks)
            assert slots.write_tokens[-1] == count - 1
            last = int(slots.write_blocks[-1])
            if mode == "all":
                for _, token, block in writes(slots):
                    assert TABLES[0][(computed + token) // 4] == block
            computed += count


class Tiny(RecurrentLayer):
    writes_borders = True


def make_layer(mode: str = "none", kind: type[RecurrentLayer] = Tiny, **cache: str):
    config = JubakoConfig().replace(
        model_config={"dtype": "bfloat16", "max_model_len": 100},
        cache_config={"mamba_cache_mode": mode, **cache},
    )
    states = {
        "conv": ((3, 5), state_dtype(config, "conv")),
        "ssm": ((2, 4), state_dtype(config, "ssm")),
    }
    return kind(config=config, layer_name="tiny", states=states)


def test_states_share_a_page_without_touching() -> None:
    layer = make_layer()
    spec = layer.get_kv_cache_spec(16)
    assert isinstance(spec, MambaSpec)
    assert spec.dtypes == ("bfloat16", "float32")
    assert spec.block_size == 100
    # 30 + 32 bytes, and no float32 begins between two words.
    assert spec.page_size_bytes == 64
    layer.bind_kv_cache(torch.zeros(6, 80, dtype=torch.int8), 100)
    for name, state in layer.states.items():
        assert state.shape == (6, *layer.state_shapes[name])
        for block in range(6):
            state[block] = block + (0.5 if name == "conv" else 0.25)
    for block in range(6):
        assert (layer.states["conv"][block] == block + 0.5).all()
        assert (layer.states["ssm"][block] == block + 0.25).all()


def test_kept_states_have_the_blocks_of_the_cache() -> None:
    assert make_layer("all").get_kv_cache_spec(16).block_size == 16
    assert make_layer("align").get_kv_cache_spec(16).block_size == 16


def test_dtypes_of_states_can_be_chosen() -> None:
    layer = make_layer(mamba_cache_dtype="float32", mamba_ssm_cache_dtype="bfloat16")
    assert layer.state_dtypes == {"conv": "float32", "ssm": "bfloat16"}


def test_a_layer_that_does_not_write_borders_refuses_to() -> None:
    with pytest.raises(ConfigError, match="mamba_cache_mode=all"):
        make_layer("all", RecurrentLayer)


def test_a_profiling_run_has_no_states() -> None:
    layer = make_layer()
    with set_forward_context(None):
        slots = layer.step_slots(7)
    assert slots.query_start_loc.tolist() == [0, 7]
    assert slots.read_blocks.tolist() == [-1]
    assert not len(slots.write_blocks)
    assert layer.states["ssm"].shape[0] == 0


def test_layers_of_a_group_share_what_was_derived() -> None:
    one, two = make_layer(), make_layer()
    metadata = make_metadata([2], [2], [[5]], 100)
    with set_forward_context({"tiny": metadata}):
        assert one.step_slots(2) is two.step_slots(2)
