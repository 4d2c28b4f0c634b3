"""Where a checkpoint lies on disk, and how it gets there whole or not at all.

```
save_dir/latest                       the newest complete tag, replaced last
save_dir/<tag>/                       complete: renamed from .<tag>.partial when every byte is on the disk
save_dir/zero_to_fp32.py, zero_to_torch.py
```
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lazytrain_plugin.errors import CheckpointError
from lazytrain_plugin.units import format_bytes

MODEL_STATES = "zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
OPTIM_STATES = "{bf16}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def complete_or_nothing(save_dir: Path, tag: str, *, need_bytes: int) -> Iterator[Path]:
    """Yields an empty folder that becomes `save_dir/tag` when the block ends without an exception.

    An older checkpoint of the same tag stays valid until then. Whatever ends the block early, the partial folder is
    removed and `save_dir/tag` is as before; a process that is killed leaves `.<tag>.partial`, which nothing reads and
    the next save of that tag removes.

    Raises:
        CheckpointError: the disk has less than `need_bytes` free, or ran full.
    """
    final, partial, old = _paths(save_dir, tag)
    final.parent.mkdir(parents=True, exist_ok=True)
    recover(save_dir, tag)
    shutil.rmtree(partial, ignore_errors=True)
    free_bytes = shutil.disk_usage(final.parent).free
    if free_bytes < need_bytes:
        raise CheckpointError(_disk_full_message(final, need_bytes, free_bytes, "not started"))
    try:
        partial.mkdir()
        yield partial
        sync_folder(partial)
        if final.exists():
            final.rename(old)
        partial.rename(final)
        sync_folder(final.parent)
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        free_bytes = shutil.disk_usage(final.parent).free
        raise CheckpointError(_disk_full_message(final, need_bytes, free_bytes, "undone")) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def recover(save_dir: Path, tag: str) -> None:
    """Puts the older checkpoint of `tag` back if a process died between the two renames of its replacement."""
    final, _, old = _paths(save_dir, tag)
    if old.is_dir() and not final.exists():
        with suppress(FileNotFoundError):  # another rank that loads it was first
            old.rename(final)


def write_latest(save_dir: Path, tag: str) -> None:
    """Replaces `save_dir/latest` in one step."""
    partial = save_dir / ".latest.partial"
    with open(partial, "w") as file:
        file.write(tag)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(save_dir / "latest")
    sync_folder(save_dir)


def read_latest(load_dir: Path) -> str | None:
    """The newest complete tag; None when no checkpoint was ever completed in `load_dir`."""
    latest = load_dir / "latest"
    return latest.read_text().strip() if latest.is_file() else None


def find_files(load_dir: Path, tag: str) -> tuple[list[Path], list[Path]]:
    """The model and optimizer files of a tag, one of each per saving rank, in rank order.

    Raises:
        CheckpointError: there is no such checkpoint, it is incomplete, or not a ZeRO stage-3 one.
    """
    recover(load_dir, tag)
    folder = load_dir / tag
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint {folder}; {complete_tags(load_dir)}")
    model_files: list[Path] = []
    while (path := folder / MODEL_STATES.format(rank=len(model_files))).is_file():
        model_files.append(path)
    optim_files: list[Path] = []
    for rank in range(len(model_files)):
        names = (OPTIM_STATES.format(bf16=bf16, rank=rank) for bf16 in ("bf16_", ""))
        optim_files += [folder / name for name in names if (folder / name).is_file()][:1]
    if not model_files and (folder / "mp_rank_00_model_states.pt").is_file():
        raise CheckpointError(
            f"{folder} was saved by ZeRO stage 0, 1 or 2; stage 3 files are needed: run its zero_to_fp32.py and start "
            "from those weights"
        )
    expected = len(list(folder.glob("*_model_states.pt"))), len(list(folder.glob("*_optim_states.pt")))
    if not model_files or (len(model_files), len(optim_files)) != expected or expected[0] != expected[1]:
        raise CheckpointError(
            f"{folder} is incomplete: {expected[0]} *_model_states.pt and {expected[1]} *_optim_states.pt where one of "
            f"each per rank is needed; {complete_tags(load_dir, but=tag)}"
        )
    return model_files, optim_files


def sync_folder(folder: Path) -> None:
    """Makes renames and new files in `folder` survive a power failure."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _paths(save_dir: Path, tag: str) -> tuple[Path, Path, Path]:
    final = save_dir / tag
    return final, final.with_name(f".{final.name}.partial"), final.with_name(f".{final.name}.old")


def complete_tags(load_dir: Path, but: str | None = None) -> str:
    """What else to load, as an error says it."""
    tags = sorted({path.parent.name for path in load_dir.glob("[!.]*/" + MODEL_STATES.format(rank=0))} - {but})
    return f"load one of the tags {', '.join(tags)}" if tags else "start the training anew or pass another folder"


def _disk_full_message(path: Path, need_bytes: int, free_bytes: int, outcome: str) -> str:
    return (
        f"checkpoint {path} {outcome}: it needs {format_bytes(need_bytes)} and the disk has {format_bytes(free_bytes)} "
        "free; earlier checkpoints are untouched. Free space, keep fewer checkpoints, or save elsewhere"
    )
