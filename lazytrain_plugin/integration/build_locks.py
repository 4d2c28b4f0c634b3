"""Builds of torch extensions, which say nothing: whether one is to come, and locks that killed ones left behind.

torch makes the file `lock` in an extension's folder, holds it open while it compiles, and removes it; every other
process waits until it is gone, on the lock of a killed build for ever.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)

SHARED_MEMORY_OP = "deepspeed_shm_comm"
"""DeepSpeed's op for all-reduce among CPU ranks of one host."""
STALE_AFTER_S = 60.0
"""A lock of this age that no process here holds: one held on another host is younger, as a rule."""


def build_root() -> Path:
    """Where torch builds extensions."""
    from torch.utils import cpp_extension

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())


def is_built(extension: str = SHARED_MEMORY_OP) -> bool:
    """Whether torch finds a library that it built with the torch of this environment, and has little to do."""
    import torch

    installed_s = Path(torch.__file__).stat().st_mtime
    root = build_root()
    libraries = [*root.glob(f"{extension}/{extension}.so"), *root.glob(f"*/{extension}/{extension}.so")]
    return any(library.stat().st_mtime >= installed_s for library in libraries)


def find_locks(extension: str = "*") -> list[Path]:
    """Lock files that no process of this machine holds."""
    root = build_root()
    locks = [*root.glob(f"{extension}/lock"), *root.glob(f"*/{extension}/lock")]
    return [lock for lock in locks if not _is_held(lock)]


def wait_for_builder(extension: str = SHARED_MEMORY_OP) -> Path | None:
    """The stale lock on which a build of `extension` would wait, None if there is none.

    A young lock that nobody here holds may be another host's: it is waited for, until it is old. All ranks of a machine
    come to the same answer.
    """
    told = False
    while locks := find_locks(extension):
        try:
            age_s = time.time() - locks[0].stat().st_mtime
        except FileNotFoundError:
            continue
        if age_s > STALE_AFTER_S:
            return locks[0]
        if not told:
            logger.info("waiting up to %.0f s for whoever builds under %s", STALE_AFTER_S, locks[0])
            told = True
        time.sleep(0.2)
    return None


def _is_held(lock: Path) -> bool:
    """Whether a process has the file open (those of other users can't be asked; they have folders of their own)."""
    try:
        wanted = lock.stat()
    except FileNotFoundError:
        return True  # it is gone: nobody waits for it
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            for link in folder.iterdir():
                opened = link.stat()
                if (opened.st_dev, opened.st_ino) == (wanted.st_dev, wanted.st_ino):
                    return True
        except OSError:
            continue
    return False
