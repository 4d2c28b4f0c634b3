"""`RunFolder`: a folder of one run inside the user's NVMe folder. Ours alone, locked, and gone afterwards.

Liveness is decided by a lock on the `owner` file, which the kernel drops when the process dies, however it dies. The
owner's host, process id and start time stand in it for people, and against file systems whose locks are local to a
machine or do nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import mmap
import os
import re
import secrets
import socket
import weakref
from pathlib import Path

import psutil

from lazytrain_plugin.config.folders import check_nvme_folder, filesystem_type, free_bytes
from lazytrain_plugin.errors import StorageError
from lazytrain_plugin.units import format_bytes

logger = logging.getLogger(__name__)

ALIGNMENT_BYTES = 4096
"""Of memory, offsets and sizes in direct I/O."""
_OWNER = "owner"
_MAGIC = "lazytrain run"
_LOCAL = ("ext4", "ext3", "xfs", "btrfs", "f2fs", "zfs", "overlay")
"""File systems of one machine, whose locks every container on it sees."""
_RUN_NAME = re.compile(r"lazytrain-run-\d+-[0-9a-f]{8}")
_FILE_NAME = re.compile(r"\d{5}\.bin")


class RunFolder:
    """One run's folder inside `parent`; left-overs of dead runs there are removed first.

    Raises:
        ConfigError: `parent` is missing, not writable, or memory.
        StorageError: the folder can't be made.
    """

    def __init__(self, parent: str | Path) -> None:
        check_nvme_folder("lazytrain.nvme_path", str(parent))
        self.parent = Path(parent).expanduser().absolute()
        remove_leftovers(self.parent)
        self.path = self.parent / f"lazytrain-run-{os.getpid()}-{secrets.token_hex(4)}"
        self._count = 0
        self._fds: dict[str, int] = {}
        try:
            self.path.mkdir(mode=0o700)
            self._lock_fd = _write_owner(self.path / _OWNER)
        except OSError as error:
            raise StorageError(
                f"can't make {self.path}: {error.strerror}, {format_bytes(free_bytes(self.parent))} free; "
                'free space there, or name another folder in "nvme_path"'
            ) from error
        # At exit too; not in a forked child, whose parent still works here.
        self._finalizer = weakref.finalize(self, _remove_if_owner, self.path, os.getpid())
        self.direct = self._takes_direct_io()
        if not self.direct:
            logger.warning(
                "%s takes no direct I/O: what rests there goes through the page cache, which costs a copy in memory "
                "and processor time (about half the speed of a fast disk). A local ext4 or xfs avoids that",
                self.parent,
            )

    def _takes_direct_io(self) -> bool:
        probe = self.path / "99999.bin"
        try:
            fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
            try:
                with mmap.mmap(-1, ALIGNMENT_BYTES) as page:
                    os.pwrite(fd, page, 0)
            finally:
                os.close(fd)
            return True
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise StorageError(
                f"can't write to {self.path}: {error.strerror}, {format_bytes(free_bytes(self.parent))} free; "
                'free space there, or name another folder in "nvme_path"'
            ) from error
        finally:
            probe.unlink(missing_ok=True)

    def create(self, nbytes: int, *, direct: bool, what: str) -> tuple[int, str]:
        """A file of `nbytes` whose space is taken now. Returns (descriptor, path).

        Args:
            direct: past the page cache, where the file system can.
            what: for messages.

        Raises:
            StorageError: the disk has no room for it.
        """
        path = str(self.path / f"{self._count:05}.bin")
        self._count += 1
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(path, flags | (os.O_DIRECT if direct and self.direct else 0), 0o600)
            self._fds[path] = fd
            if nbytes > 0:
                os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            self.delete(path)
            if error.errno == errno.EMFILE:
                raise StorageError(f"{what}: too many open files; raise `ulimit -n`") from error
            raise StorageError(
                f"no room on NVMe for {what}: {format_bytes(nbytes)} needed at {self.path}, "
                f"{format_bytes(free_bytes(self.parent))} free ({error.strerror}). Free space there, name a larger "
                'disk or several folders in "nvme_path", or plan with a smaller "nvme_gib"'
            ) from error
        return fd, path

    def delete(self, path: str) -> None:
        """Closes and removes a file. A mapping of it keeps its contents alive."""
        fd = self._fds.pop(path, None)
        if fd is not None:
            os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def close(self) -> None:
        """Removes the folder with everything in it. Safe to call twice."""
        for path in list(self._fds):
            self.delete(path)
        self._finalizer()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


class PeerFile:
    """Stands for a `RunFolder` of which another rank of the node has made one file.

    Args:
        path: of the file.
        direct: past the page cache, as its owner does.
        writes: not only to be read here.
    """

    def __init__(self, path: str, *, direct: bool, writes: bool = False) -> None:
        self._path = path
        self.direct = direct
        self._flags = os.O_CLOEXEC | (os.O_RDWR if writes else os.O_RDONLY)
        self._fd: int | None = None

    def create(self, nbytes: int, *, direct: bool, what: str) -> tuple[int, str]:
        """Opens it. Arguments as of `RunFolder.create`.

        Raises:
            StorageError: it can't be read.
        """
        try:
            self._fd = os.open(self._path, self._flags | (os.O_DIRECT if direct and self.direct else 0))
        except OSError as error:
            raise StorageError(
                f"can't open {what} ({format_bytes(nbytes)}), which another rank of this node has at {self._path}: "
                f'{error.strerror}. All ranks of a node must run as one user, and see the folders of "nvme_path"'
            ) from error
        return self._fd, self._path

    def delete(self, path: str) -> None:
        """Closes it; its owner removes it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _write_owner(path: Path) -> int:
    """Locked before anything stands in it: a readable owner file without a lock is a dead run's."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: process id and start time have to do
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    owner = {
        "what": _MAGIC,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
    }
    os.write(fd, json.dumps(owner).encode())
    return fd


def remove_leftovers(parent: Path) -> None:
    """Removes the folders of dead runs in `parent`. A live run's, and what isn't ours, is left alone."""
    removed_bytes, removed = 0, []
    for path in sorted(parent.iterdir()):
        if _RUN_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):
                if (freed := _remove_if_dead(path)) is not None:
                    removed_bytes += freed
                    removed.append(path.name)
    if removed:
        logger.info(
            "removed what %d ended run%s left behind in %s: %s (%s)",
            len(removed),
            "s" if len(removed) > 1 else "",
            parent,
            ", ".join(removed),
            format_bytes(removed_bytes),
        )


def _remove_if_dead(path: Path) -> int | None:
    """Bytes freed, or None when the folder's owner lives or is unknown."""
    fd = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        owner = json.loads(os.read(fd, 4096))
        if not isinstance(owner, dict) or owner.get("what") != _MAGIC:
            return None
        here = owner.get("host") == socket.gethostname()
        # Another host (or container) may hold a lock that is not seen here, unless the disk is this machine's own.
        if _is_running(owner) if here else filesystem_type(path) not in _LOCAL:
            return None
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: alive after all
        freed = sum(file.stat().st_blocks * 512 for file in path.iterdir() if file.is_file())
        _remove(path)
        return freed
    except ValueError:
        return None
    finally:
        os.close(fd)


def _is_running(owner: dict) -> bool:
    try:
        return abs(psutil.Process(owner["pid"]).create_time() - owner["started"]) < 1.0
    except psutil.Error:
        return False


def _remove(path: Path) -> None:
    """Removes our files and the folder; what somebody else put there stays, and the folder with it."""
    for file in sorted(path.iterdir()):
        if _FILE_NAME.fullmatch(file.name):
            file.unlink(missing_ok=True)
    foreign = [file.name for file in path.iterdir() if file.name != _OWNER]
    if foreign:
        logger.warning("%s is not removed: %s in it is not LazyTrain's", path, ", ".join(foreign[:3]))
        return
    (path / _OWNER).unlink(missing_ok=True)
    path.rmdir()


def _remove_if_owner(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        with contextlib.suppress(FileNotFoundError):
            _remove(path)
