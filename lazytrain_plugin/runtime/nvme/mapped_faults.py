"""Names the file when a disk fails under a mapping.

[Note: SIGBUS] Reads and writes of ours go through the I/O threads before a mapping is touched, so that a failing disk
is a StorageError there. Whoever holds the model may touch a mapped weight at any time, though, and a failing disk then
is a signal (SIGBUS) that no program survives with its data. The handler in kernels/csrc/mapped_faults.cpp says which
file it was and what to do; then the signal goes on to who was asked before, by default to the end of the process.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import weakref

from lazytrain_plugin.kernels.native import LIBRARY

logger = logging.getLogger(__name__)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = ctypes.CDLL(str(LIBRARY))
    if not hasattr(library, "lazytrain_mapping_add"):
        logger.warning(
            "the C++ library is older than this version: should the disk fail under weights on NVMe, the process ends "
            "without naming the file. Run: python -m lazytrain_plugin._build"
        )
        return None
    library.lazytrain_mapping_add.restype = ctypes.c_int
    library.lazytrain_mapping_add.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p]
    library.lazytrain_mapping_remove.restype = None
    library.lazytrain_mapping_remove.argtypes = [ctypes.c_int]
    return library


def watch(mapping: mmap.mmap, address: int, path: str) -> None:
    """From now until the mapping is gone, a fault in it is explained on stderr. See [Note: SIGBUS].

    Args:
        address: where the mapping starts.
        path: of the file.
    """
    library = _library()
    if library is not None:
        entry = library.lazytrain_mapping_add(address, len(mapping), path.encode())
        weakref.finalize(mapping, library.lazytrain_mapping_remove, entry).atexit = False
