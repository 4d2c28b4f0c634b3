"""DeepSpeed's asynchronous I/O for comparisons, also where libaio's headers are not installed.

    python benchmarks/deepspeed_aio.py     # compile what comparisons with DeepSpeed's NVMe offload need, all at once

DeepSpeed compiles its operators on first use, one after the other; the command does it beforehand and in parallel, and
prints one JSON line per operator. They stay in torch's folder of extensions (TORCH_EXTENSIONS_DIR).

`async_io` needs libaio, which is a thin layer over four system calls of the kernel. `benchmarks/libaio` has the part of
it that DeepSpeed uses; results say which of the two was used.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_DRIVER_FOLDERS = tuple(map(Path, ("/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")))
_SOURCE = Path(__file__).parent / "libaio"
_OWN = "benchmarks/libaio, the kernel's calls"
_OPERATORS = {"pin_memory": "PinMemoryBuilder", "async_io": "AsyncIOBuilder", "cpu_adam": "CPUAdamBuilder"}


def plain_architectures() -> None:
    """Lets DeepSpeed read the list of GPU architectures: it takes "9.0" and "9.0+PTX", no "9.0a".

    Before DeepSpeed is imported, and before operators are compiled; children inherit it.
    """
    given = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if given:
        plain = (re.sub(r"^(\d+\.\d+)[a-z]", r"\1", name) for name in re.split(r"[ ;]+", given) if name)
        os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(dict.fromkeys(plain))


def prepare_libaio() -> str:
    """Makes `-laio` and `<libaio.h>` found by compilers of this process and its children; returns what was used.

    Raises:
        RuntimeError: neither is there, nor a C compiler.
    """
    plain_architectures()
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("no C compiler")
    _find_driver()
    folder = _scratch("libaio")
    if str(folder) in os.environ.get("CPATH", "").split(os.pathsep):  # by this process or its parent
        return _OWN
    program = "#include <libaio.h>\nint main(void) { return io_submit(0, 0, 0); }"
    with tempfile.TemporaryDirectory() as scratch:
        check = subprocess.run(
            [compiler, "-x", "c", "-", "-laio", "-o", f"{scratch}/check"], input=program, text=True, capture_output=True
        )
    if check.returncode == 0:
        return "libaio of this machine"
    shutil.copy2(_SOURCE / "libaio.h", folder)  # with its time: a newer header would compile everything again
    library = folder / "libaio.so"
    made = subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", f"-Wl,-soname,{library}", str(_SOURCE / "libaio.c"), "-o", str(library)],
        capture_output=True,
        text=True,
    )
    if made.returncode != 0:
        raise RuntimeError(f"benchmarks/libaio does not compile: {made.stderr.strip()[-300:]}")
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    for variable in ("CPATH", "LIBRARY_PATH"):
        _prepend(variable, folder)
    return _OWN


def _find_driver() -> None:
    """DeepSpeed links `async_io` with -lcuda: a name that the toolkit has a stub of, and drivers in odd places lack."""
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None:
        return
    stub = next(Path(CUDA_HOME).glob("**/stubs/libcuda.so"), None)
    if stub is not None:
        _prepend("LIBRARY_PATH", stub.parent)
        return
    driver = next((path / "libcuda.so.1" for path in _DRIVER_FOLDERS if (path / "libcuda.so.1").exists()), None)
    if driver is not None:
        folder = _scratch("driver")
        (folder / "libcuda.so").unlink(missing_ok=True)
        (folder / "libcuda.so").symlink_to(driver)
        _prepend("LIBRARY_PATH", folder)


def _scratch(name: str) -> Path:
    folder = Path(tempfile.gettempdir()) / f"lazytrain-{name}-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    return folder


def _prepend(variable: str, folder: Path) -> None:
    os.environ[variable] = os.pathsep.join(filter(None, (str(folder), os.environ.get(variable))))


def aio_handle(block_bytes: int, queue_depth: int, threads: int):
    """DeepSpeed's handle; compiles it first where that was not done. Returns (handle, which libaio).

    Raises:
        RuntimeError: why there is none.
    """
    which = prepare_libaio()
    try:
        module = load("async_io")
    except Exception as error:  # a compiler's, a linker's, DeepSpeed's own
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = next((line for line in lines if " error: " in line), lines[-1])  # a compiler's first one
        raise RuntimeError(f"DeepSpeed's async_io can't be made here: {reason[:300]}") from error
    handle = module.aio_handle(
        block_size=block_bytes,
        queue_depth=queue_depth,
        single_submit=False,
        overlap_events=True,
        intra_op_parallelism=threads,
    )
    return handle, which


def load(name: str):
    """A module of DeepSpeed's, compiled if need be; from then on DeepSpeed takes this one.

    Its sources that include torch are compiled as one file: their headers cost half a minute each time. Call
    `prepare_libaio` first.
    """
    if name == "async_io":
        load("pin_memory")  # async_io looks for its symbols
    return _compiled(name).load(verbose=False)


def _compiled(name: str):
    """DeepSpeed's builder, its operator compiled and loaded."""
    plain_architectures()
    from deepspeed.ops import op_builder

    base = getattr(op_builder, _OPERATORS[name])

    class Builder(base):
        def sources(self) -> list[str]:
            given = [Path(self.deepspeed_src_path(source)) for source in super().sources()]
            alone = [str(source) for source in given if source.parent.name == "common"]  # without torch
            folders = [Path(self.deepspeed_src_path(folder)) for folder in self.include_paths()]
            seen: set[Path] = set()
            text = "".join(_inlined(source, folders, seen) for source in given if source.parent.name != "common")
            joined = _scratch("operators") / f"{name}_in_one.cpp"
            if not joined.exists() or joined.read_text() != text:
                joined.write_text(text)
            return [*alone, str(joined)]

        def cxx_args(self) -> list[str]:
            return [text for text in super().cxx_args() if text != "-g"]  # of torch's headers, mostly

    builder = Builder()
    if name not in builder._loaded_ops:
        builder.jit_load(verbose=False)
    return base()


def _inlined(path: Path, folders: list[Path], seen: set[Path]) -> str:
    """A source with DeepSpeed's own headers in place of their includes, each once: not all have guards."""
    lines = []
    for line in path.read_text().splitlines(keepends=True):
        header = re.match(r'\s*#include\s*["<]([^">]+)[">]', line)
        places = [folder / header[1] for folder in (path.parent, *folders)] if header else []
        found = next((place.resolve() for place in places if place.is_file() and "csrc" in place.parts), None)
        if found is None:
            lines.append("" if line.startswith("#pragma once") else line)
        elif found not in seen:
            seen.add(found)
            lines.append(_inlined(found, folders, seen))
    return "".join(lines)


def build() -> int:
    """Compiles all operators in parallel, a process for each; returns how many failed.

    Nobody else may be compiling them: locks of builds that were killed are removed, which would be waited for.
    """
    from torch.utils.cpp_extension import _get_build_directory

    prepare_libaio()
    for name in _OPERATORS:
        (Path(_get_build_directory(name, verbose=False)) / "lock").unlink(missing_ok=True)
    start_s = time.perf_counter()
    running = {
        name: subprocess.Popen(
            [sys.executable, __file__, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name in _OPERATORS
    }
    failed = 0
    for name, process in running.items():
        said = process.communicate()[0].strip().splitlines()
        line = {"operator": name, "s": round(time.perf_counter() - start_s, 1)}
        if process.returncode != 0:
            failed += 1
            errors = [text for text in said if " error: " in text] or said[-1:] or ["no output"]
            line["error"] = errors[0][:400]
        print(json.dumps(line), flush=True)
    return failed


def _compile_only(name: str) -> None:
    from torch.utils import cpp_extension

    # async_io can be imported after pin_memory only, and here nobody does.
    cpp_extension._import_module_from_library = lambda *args, **kwargs: None
    _compiled(name)


if __name__ == "__main__":
    sys.exit(build() if len(sys.argv) == 1 else _compile_only(sys.argv[1]))
