"""Which calls of an engine are the parts of a step?

A recorder is put around methods of the objects of one engine, so that an engine that is not
profiled runs no line of this. A native program tells the time of each op; elsewhere each call of a
kernel is timed, and what lies between them counts as the model.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from jubako.engine.client import InprocClient
from jubako.entrypoints.profiling.recorder import Recorder
from jubako.kernels import interface
from jubako.kernels.registry import get_kernels

if TYPE_CHECKING:
    from jubako.frontend.llm_engine import LLMEngine

SCHEDULE, PREPARE, MODEL, HEAD = "schedule", "prepare", "model", "LM head"
SAMPLE, UPDATE, DETOKENISE = "sample", "update", "detokenise"

_NO_KERNELS = frozenset({"use_threads", "pack", "pack_blocks", "pack_experts"})


def instrument_kernels(recorder: Recorder) -> None:
    """Time the kernels, once in a process and before the model is built, which takes them then."""
    kernels = get_kernels()
    for name in vars(interface.Kernels):
        if (
            not name.startswith("_")
            and name not in _NO_KERNELS
            and callable(getattr(kernels, name, None))
        ):
            recorder.wrap(kernels, name, f"kernel {name}")


def release_kernels() -> None:
    """Take off what `instrument_kernels` put around them."""
    kernels = get_kernels()
    for name in [n for n in vars(interface.Kernels) if n in vars(kernels)]:
        delattr(kernels, name)


def attach(recorder: Recorder, engine: LLMEngine) -> None:
    """Time the parts of `engine`'s steps; it must run in this process."""
    client = engine.client
    assert isinstance(client, InprocClient)
    core = client.core
    recorder.wrap(core.scheduler, "schedule", SCHEDULE)
    recorder.wrap(core.scheduler, "update_from_output", UPDATE)
    recorder.wrap(engine._outputs, "process_outputs", DETOKENISE)
    runner: Any = core.executor.worker.model_runner  # type: ignore[attr-defined]
    recorder.wrap(runner, "sample_tokens", SAMPLE)
    recorder.wrap(runner, "execute_model", MODEL)
    recorder.wrap(runner, "_update_states", PREPARE)
    recorder.wrap(runner._input_builder, "build", PREPARE)
    recorder.wrap(runner.model, "compute_logits", HEAD)
    if runner._native is not None:
        _time_ops(recorder, runner._native._program)


def op_families() -> dict[int, str]:
    """Number of a native op → the family it counts to."""
    from jubako.kernels.cpu import attention, elementwise, experts, head, matmul, recurrent

    return {
        matmul.OP_MATMUL: "op matmul",
        matmul.OP_EMBED: "op embedding",
        head.OP_HEAD_GREEDY: "op LM head + argmax",
        attention.OP_PAGED_ATTENTION: "op attention",
        elementwise.OP_NORM: "op norm",
        elementwise.OP_ADD_NORM: "op norm",
        elementwise.OP_ROPE: "op rotary + KV write",
        elementwise.OP_ROTATION: "op rotary + KV write",
        elementwise.OP_KV_WRITE: "op rotary + KV write",
        elementwise.OP_GATED_ACTIVATION: "op activation",
        elementwise.OP_CONVERT: "op convert",
        elementwise.OP_POINTWISE: "op activation",
        elementwise.OP_GATE: "op activation",
        elementwise.OP_GATED_NORM: "op norm",
        elementwise.OP_POSITION_SCALE: "op rotary + KV write",
        experts.OP_ROUTE: "op experts",
        experts.OP_EXPERTS: "op experts",
        recurrent.OP_CAUSAL_CONV: "op recurrence",
        recurrent.OP_SSD_SCAN: "op recurrence",
        recurrent.OP_SELECTIVE_SCAN: "op recurrence",
        recurrent.OP_GATED_DELTA: "op recurrence",
    }


def _time_ops(recorder: Recorder, program: Any) -> None:
    families = op_families()
    native = program._pool
    names = [families.get(op.op, f"op {op.op}") for op in program._array]
    details = [f"op {i}" for i in range(len(names))]
    times = (ctypes.c_int64 * len(names))()

    class TimedPool:
        """Stands before the pool of this one program."""

        def run_program(self, ops: Any, count: int, _: Any = None) -> None:
            native.run_program(ops, count, times)
            recorder.add(names[:count], details[:count], times[:count])

        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

    program._pool = TimedPool()
