"""DeepSpeed's asynchronous I/O for comparisons, also where libaio's headers are not installed.

DeepSpeed compiles its `async_io` on first use against libaio, which is a thin layer over four system calls of the
kernel. `benchmarks/libaio` has the part of it that DeepSpeed uses; results say which of the two was used.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).parent / "libaio"


def prepare_libaio() -> str:
    """Makes `-laio` and `<libaio.h>` found by compilers of this process and its children; returns what was used.

    Raises:
        RuntimeError: neither is there, nor a C compiler.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("no C compiler")
    program = "#include <libaio.h>\nint main(void) { return io_submit(0, 0, 0); }"
    with tempfile.TemporaryDirectory() as folder:
        check = subprocess.run(
            [compiler, "-x", "c", "-", "-laio", "-o", f"{folder}/check"], input=program, text=True, capture_output=True
        )
    if check.returncode == 0:
        return "libaio of this machine"
    folder = Path(tempfile.gettempdir()) / f"lazytrain-libaio-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    shutil.copy(_SOURCE / "libaio.h", folder)
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
        os.environ[variable] = os.pathsep.join(filter(None, (str(folder), os.environ.get(variable))))
    return "benchmarks/libaio, the kernel's calls"


def aio_handle(block_bytes: int, queue_depth: int, threads: int):
    """DeepSpeed's handle; compiles it first, which takes a minute or two. Returns (handle, which libaio).

    Raises:
        RuntimeError: why there is none.
    """
    which = prepare_libaio()
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        module = AsyncIOBuilder().load(verbose=False)
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
