"""Resolve the requirements anew and write the locked files.

Two throw-away environments are made: one with the package's own requirements and the default model
(`runtime.txt`), one that adds `dev.in` (`dev.txt`). PyTorch is held at the version below, whose
plain release installs a CPU build where only such a build is offered.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

TORCH = "torch==2.13.0"
HERE = Path(__file__).parent
HEADER = "# Made by `make lock`; exact versions for development and CI.\n"


def freeze(python: Path) -> list[str]:
    """Installed distributions as `name==version`, without local version labels."""
    output = subprocess.run(
        [python, "-m", "pip", "list", "--format=freeze", "--exclude", "pip"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    skip = ("setuptools==", "jubako")
    return [line.split("+")[0] for line in output.splitlines() if not line.startswith(skip)]


def main() -> None:
    """Write runtime.txt and dev.txt."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["default-model"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder) / "bin" / "python"
        install = [python, "-m", "pip", "install", "--quiet", TORCH]
        subprocess.run([*install, *wanted], check=True)
        runtime = freeze(python)
        (HERE / "runtime.txt").write_text(HEADER + "\n".join(runtime) + "\n")
        subprocess.run([*install, "-r", str(HERE / "dev.in"), *runtime], check=True)
        extra = [line for line in freeze(python) if line not in runtime]
        (HERE / "dev.txt").write_text(HEADER + "-r runtime.txt\n" + "\n".join(extra) + "\n")


if __name__ == "__main__":
    main()
