"""The checks themselves: a wrong slot is seen, and changes the answer."""

from __future__ import annotations

import pytest

from jubako.kv_cache import KVCacheSpec
from tests.kv_cache.fakes import chunked, full, mamba, window
from tests.scheduler.harness import Driver, make_request, make_scheduler

GROUPS: list[list[KVCacheSpec]] = [
    [full(4)],
    [full(4), window(8, 4)],
    [full(4), chunked(8, 4)],
    [full(4), mamba("all", 0, 4)],
    [full(4), mamba("align", 0, 4)],
]


def answered_with_a_wrong_slot(specs: list[KVCacheSpec], group: int, strict: bool) -> Driver:
    driver = Driver(make_scheduler(specs=specs, max_model_len=64))
    driver.mirror.strict = strict
    driver.add(make_request("a", 10, 12, ignore_eos=True))
    driver.run(2)
    # The block that the next token reads, whatever kind of group it is.
    block_id = driver.mirror.requests["a"].block_ids[group][-1]
    _, slots = driver.mirror.memory.blocks[block_id]
    for offset in slots:
        slots[offset] += 1
    driver.run()
    return driver


@pytest.mark.parametrize(
    ("specs", "group"), [(specs, group) for specs in GROUPS for group in range(len(specs))]
)
def test_a_wrong_slot_is_seen_and_changes_the_answer(specs: list[KVCacheSpec], group: int):
    with pytest.raises(AssertionError, match=f"group {group}: block"):
        answered_with_a_wrong_slot(specs, group, strict=True)
    driver = answered_with_a_wrong_slot(specs, group, strict=False)
    with pytest.raises(AssertionError, match="'a'"):
        driver.check_answers()
