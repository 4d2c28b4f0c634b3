"""Builds the C++ kernels when a wheel is made or the package is installed for development; setup.py is the caller.

One object per instruction set from the same kernels.cpp, chosen at run time. `-ffp-contract=off`: a fused multiply-add
rounds once where the other instruction sets round twice. The library links neither Python nor torch, so one `py3-none`
wheel serves all.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "kernels" / "csrc"
LIBRARY_NAME = "liblazytrain_kernels.so"
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-ignored-attributes"),
]
LINK_FLAGS = ["-shared", "-pthread", "-static-libstdc++", "-static-libgcc"]
AVX512_FLAGS = [
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
    # gcc 12's own AVX-512 headers warn about their undefined pass-through operands
    *("-Wno-maybe-uninitialized", "-Wno-uninitialized"),
]


def find_compiler() -> str | None:
    """$CXX if set, else g++, else c++."""
    return next((path for name in (os.environ.get("CXX"), "g++", "c++") if name and (path := shutil.which(name))), None)


def is_current(output: Path) -> bool:
    """Whether `output` is at least as new as every source and as this file."""
    newest = max(path.stat().st_mtime for path in (*SOURCES.iterdir(), Path(__file__)))
    return output.exists() and output.stat().st_mtime >= newest


def build_library(output: Path) -> None:
    """Compiles and links `output`; replaces it only when complete, since a running process may have it mapped.

    Raises RuntimeError with the compiler's words when there is no compiler or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler (g++ or c++) on PATH")
    objects = {name: (f"{name}.cpp", []) for name in ("library", "pool", "io", "mapped_faults")}
    objects["generic"] = ("kernels.cpp", _table("generic"))
    if platform.machine() in ("x86_64", "AMD64"):
        objects["avx2"] = ("kernels.cpp", [*_table("avx2"), "-mavx2"])
        objects["avx512"] = ("kernels.cpp", [*_table("avx512"), *AVX512_FLAGS])
        objects["avx512vbmi"] = ("kernels.cpp", [*_table("avx512vbmi"), *AVX512_FLAGS, "-mavx512vbmi"])
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".build-") as folder, ThreadPoolExecutor() as pool:
        commands = [
            [compiler, *FLAGS, *flags, "-c", str(SOURCES / source), "-o", f"{folder}/{name}.o"]
            for name, (source, flags) in objects.items()
        ]
        list(pool.map(_run, commands))
        _run([compiler, *LINK_FLAGS, *(f"{folder}/{name}.o" for name in objects), "-o", f"{folder}/{LIBRARY_NAME}"])
        os.replace(f"{folder}/{LIBRARY_NAME}", output)


def _table(isa: str) -> list[str]:
    return [f"-DLT_TABLE=k{isa.capitalize()}", f'-DLT_NAME="{isa}"']


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{result.stdout}{result.stderr}")


if __name__ == "__main__":  # python -m lazytrain_plugin._build: in the source tree, or where the package is installed
    build_library(SOURCES.parent / LIBRARY_NAME)
    print(f"built {SOURCES.parent / LIBRARY_NAME}", file=sys.stderr)
