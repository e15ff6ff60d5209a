"""How are the native CPU kernels compiled?

All of `jubako/kernels/cpu/native` becomes one shared library beside it, which Python loads with
ctypes. Sources that depend on the instruction set are compiled once for each level; a comment
`// levels: avx512 amx` in a source's first lines names its levels, `// levels: none` that there is
one for all processors. Without a compiler, or on a system that is not Linux, Jubako runs without
the library; `JUBAKO_REQUIRE_NATIVE=1` makes that an error. `JUBAKO_SKIP_NATIVE=1` leaves it out.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

PACKAGE = Path("jubako/kernels/cpu")
NATIVE = PACKAGE / "native"
COMMON_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-psabi",
    # The intrinsics of GCC 12 read what they call undefined.
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
]
_AVX512 = ["-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"]
_LEVELS = {
    "x86_64": {
        "generic": ["-march=x86-64"],
        "avx2": ["-march=x86-64-v3"],
        "avx512": _AVX512,
        "avx512_bf16": [*_AVX512, "-mavx512bf16"],
        "amx": [*_AVX512, "-mavx512bf16", "-mavx512vbmi", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    },
    "aarch64": {
        "generic": ["-march=armv8-a"],
        "neon": ["-march=armv8.2-a+dotprod+fp16"],
        "neon_bf16": ["-march=armv8.2-a+dotprod+fp16+bf16+i8mm"],
    },
}
ONCE = ("base", "api")
"""Folders whose sources do not depend on the level."""


class BuildNative(build_ext):
    """Compile what changed, on all cores, and link it."""

    def run(self) -> None:
        """Skip everything where it cannot be built."""
        if os.environ.get("JUBAKO_SKIP_NATIVE") == "1":
            self.extensions = []
            return
        self.compiler_command = _compiler()
        problem = None
        if platform.system() != "Linux":
            problem = f"{platform.system()} is not supported"
        elif self.compiler_command is None:
            problem = "there is no C++ compiler (g++, c++ or clang++, or $CXX)"
        if problem is None:
            super().run()
            return
        if os.environ.get("JUBAKO_REQUIRE_NATIVE") == "1":
            raise SystemExit(f"The native CPU kernels cannot be built: {problem}.")
        print(f"Without native CPU kernels: {problem}.", file=sys.stderr)
        self.extensions = []

    def get_ext_filename(self, fullname: str) -> str:
        """No Python version in the name: the library knows nothing of Python."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Objects of every source and level, then the library."""
        target = Path(self.get_ext_fullpath(ext.name))
        objects_folder = Path(self.build_temp).parent / f"native-{_machine()}"
        jobs = self._jobs(objects_folder)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            compiled = list(threads.map(self._compile, jobs))
        objects = [str(job[1]) for job in jobs]
        if not any(compiled) and target.exists() and not _older(target, map(Path, objects)):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        # Linked beside it and moved: a process that has the old one mapped keeps it.
        new = target.with_suffix(f".{os.getpid()}.tmp")
        self._call(["-shared", "-Wl,--no-undefined", "-o", str(new), *objects, "-lpthread", "-lm"])
        new.replace(target)

    def _jobs(self, folder: Path) -> list[tuple[Path, Path, list[str]]]:
        """(source, object, flags) of everything."""
        levels = self._levels()
        jobs = []
        for source in sorted(NATIVE.rglob("*.cpp")):
            area = source.relative_to(NATIVE).parts[0]
            name = source.relative_to(NATIVE).with_suffix(".o")
            wanted = None if area in ONCE else _levels_of(source)
            if area in ONCE or wanted == ["none"]:
                jobs.append((source, folder / "once" / name, levels["generic"]))
                continue
            for level, flags in levels.items():
                if wanted is None or level in wanted:
                    own = [*flags, f"-DJB_ISA={level}", f"-DJB_ISA_{level}=1"]
                    jobs.append((source, folder / level / name, own))
        return jobs

    def _levels(self) -> dict[str, list[str]]:
        """Levels that the compiler knows."""
        levels = _LEVELS.get(_machine(), {"generic": []})
        return {name: flags for name, flags in levels.items() if self._knows(flags)}

    def _knows(self, flags: list[str]) -> bool:
        command = [*self.compiler_command, *flags, "-x", "c++", "-fsyntax-only", "-"]
        return subprocess.run(command, input=b"", capture_output=True).returncode == 0

    def _compile(self, job: tuple[Path, Path, list[str]]) -> bool:
        """Whether the object had to be made."""
        source, target, flags = job
        command = [*COMMON_FLAGS, *flags, "-MMD", "-c", str(source), "-o", str(target)]
        stamp = target.with_suffix(".cmd")
        text = " ".join([*self.compiler_command, *command])
        dependencies = target.with_suffix(".d")
        if (
            target.exists()
            and dependencies.exists()
            and stamp.exists()
            and stamp.read_text() == text
            and not _older(target, _read_dependencies(dependencies))
        ):
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        self._call(command)
        stamp.write_text(text)
        return True

    def _call(self, arguments: list[str]) -> None:
        done = subprocess.run([*self.compiler_command, *arguments], capture_output=True, text=True)
        if done.stderr:
            print(done.stderr, file=sys.stderr)
        if done.returncode:
            raise SystemExit(f"Compiling failed: {' '.join(arguments)}")


def _compiler() -> list[str] | None:
    named = os.environ.get("CXX")
    if named:
        return named.split()
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    return None


def _machine() -> str:
    """The target's, which the environment variable JUBAKO_MACHINE names for a cross compiler."""
    return os.environ.get("JUBAKO_MACHINE") or platform.machine()


def _levels_of(source: Path) -> list[str] | None:
    head = "".join(source.read_text().splitlines(keepends=True)[:8])
    found = re.search(r"^// levels: (.+)$", head, re.MULTILINE)
    return found[1].split() if found else None


def _read_dependencies(path: Path) -> list[Path]:
    _, _, names = path.read_text().replace("\\\n", " ").partition(":")
    return [Path(name) for name in names.split()]


def _older(target: Path, others: object) -> bool:
    """Whether one of the others is newer, or gone."""
    time = target.stat().st_mtime_ns
    return any(not p.exists() or p.stat().st_mtime_ns > time for p in others)


setup(
    ext_modules=[Extension("jubako.kernels.cpu._native", sources=[])],
    cmdclass={"build_ext": BuildNative},
)
