"""torch.save files larger than memory: written tensor by tensor in place, read through a mapping.

`torch.save` wants every tensor alive at once; for a 7B model the fp32 masters and moments are 90 GB. Here
`torch.serialization.skip_data` writes the archive with holes where the tensors go (fake tensors give the sizes), and
each tensor is then written into its hole. The result is what `torch.save` writes, the zip's CRCs included: torch never
checks them, `MappedFile` does.
"""

from __future__ import annotations

import ctypes
import io
import math
import mmap
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lazytrain_plugin.errors import CheckpointError
from lazytrain_plugin.runtime.zip_checksums import Crc32Pool, Record, record_name, records_of, write_crc32
from lazytrain_plugin.units import MIB

KeyPath = tuple[Any, ...]
"""Keys and indices that lead from the root of a skeleton to a leaf."""

_CHUNK_BYTES = 64 * MIB  # of a tensor copied to the CPU, or handed to one write call, at a time
_RECORD_OVERHEAD_BYTES = 512  # zip headers, alignment and pickle of one tensor: about 350 bytes
_SMALL_BYTES = MIB  # tensors up to this are verified before any larger one is read
_TENSORS = "data/"  # records of tensors, beside the pickle and the archive's version


class DamagedFileError(CheckpointError):
    """Bytes of a file are not those that were written there."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that will be written later: contiguous, on the CPU."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def like(cls, tensor: Tensor) -> TensorSpec:
        return cls(tensor.shape, tensor.dtype)


class StreamedSave:
    """Writes `skeleton` to `path` as `torch.save` would, its `TensorSpec` leaves one `write` at a time.

    Memory stays constant: one chunk, plus the real tensors of the skeleton. Use it as a context manager; leaving it
    normally checks that every leaf was written and syncs the file to disk.

    Args:
        path: file to create or overwrite.
        skeleton: what `torch.save` takes. `TensorSpec` leaves may stand anywhere in dicts, lists and tuples.

    Raises:
        OSError: the disk is full or fails (from any method).
    """

    def __init__(self, path: str | os.PathLike, skeleton: object) -> None:
        self._path = Path(path)
        self._specs: dict[KeyPath, TensorSpec] = {}
        _map_specs(skeleton, self._note_spec)
        self._unwritten = set(self._specs)
        self._filled: dict[KeyPath, tuple[int, int]] = dict.fromkeys(self._specs, (0, 0))
        """Elements written so far, and their CRC."""
        with FakeTensorMode():
            fakes = _map_specs(skeleton, lambda _, spec: torch.empty(spec.shape, dtype=spec.dtype))
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(fakes, self._path)
        records = {record.name: record for record in records_of(self._path)}
        markers, real_records = self._find_records(skeleton)
        self._records = {key_path: records[name] for key_path, name in markers.items()}
        self._pool = Crc32Pool()
        self._fd = os.open(self._path, os.O_RDWR)
        for name, content in real_records.items():
            write_crc32(self._fd, records[name], self._write_bytes(memoryview(content), records[name].offset, 0))

    def _note_spec(self, key_path: KeyPath, spec: TensorSpec) -> None:
        self._specs[key_path] = spec

    def _find_records(self, skeleton: object) -> tuple[dict[KeyPath, str], dict[str, bytes]]:
        """Which archive record is which leaf, and the contents of the records of real tensors.

        Records are numbered in pickling order, which only the pickler knows (a skeleton may hold any object), so the
        skeleton is pickled once more with a recognisable tensor in place of each leaf.
        """
        token = os.urandom(16)
        key_paths = list(self._specs)
        numbers = {key_path: number for number, key_path in enumerate(key_paths)}
        archive = io.BytesIO()
        torch.save(_map_specs(skeleton, lambda key_path, _: _marker(token, numbers[key_path])), archive)
        markers: dict[KeyPath, str] = {}
        real_records: dict[str, bytes] = {}
        with zipfile.ZipFile(archive) as records:
            for info in records.infolist():
                record = record_name(info.filename)
                if not record.startswith(_TENSORS):
                    continue
                content = records.read(info)
                if content.startswith(token):
                    markers[key_paths[int.from_bytes(content[len(token) :], "little")]] = record
                else:
                    real_records[record] = content
        return markers, real_records

    def write(self, key_path: KeyPath, tensor: Tensor) -> None:
        """Fills one leaf, or the next elements of a 1-D one.

        Args:
            key_path: e.g. `("optimizer_state_dict", "fp32_flat_groups", 3)`.
            tensor: dtype and shape of the leaf's spec (1-D: fewer elements), on any device.

        Raises:
            KeyError: the skeleton has no such leaf.
            ValueError: another shape or dtype than announced, or more elements.
        """
        spec, (first, crc32) = self._specs[key_path], self._filled[key_path]
        continues = len(spec.shape) == tensor.dim() == 1 and first + tensor.numel() <= spec.shape[0]
        if tensor.dtype != spec.dtype or not (continues or (tensor.shape == spec.shape and first == 0)):
            raise ValueError(
                f"{key_path}: announced {tuple(spec.shape)} {spec.dtype}, got {tuple(tensor.shape)} {tensor.dtype}"
            )
        flat, record = tensor.detach().reshape(-1), self._records[key_path]
        step = max(1, _CHUNK_BYTES // spec.dtype.itemsize)
        for start in range(0, flat.numel(), step):
            chunk = flat[start : start + step].cpu().contiguous()
            offset = record.offset + (first + start) * spec.dtype.itemsize
            crc32 = self._write_bytes(memoryview(chunk.view(torch.uint8).numpy()), offset, crc32)
        self._filled[key_path] = first + flat.numel(), crc32
        if first + flat.numel() == math.prod(spec.shape):
            write_crc32(self._fd, record, crc32)
            self._unwritten.discard(key_path)

    def _write_bytes(self, view: memoryview, offset: int, crc32: int) -> int:
        """Writes while other threads look at the same bytes; returns the CRC of those before and these."""
        looked_at = self._pool.begin(view)
        while len(view):  # one call may write less than asked: signals, 2 GiB limit, a disk that fills up
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written
        return self._pool.finish(looked_at, crc32)

    def close(self) -> None:
        """Syncs the file to disk; raises ValueError when a leaf was never written."""
        if self._fd < 0:
            return
        if self._unwritten:
            first = next(iter(self._unwritten))
            self.abort()
            raise ValueError(f"{self._path}: {first} and {len(self._specs)} leaves in all were announced, not written")
        try:
            os.fsync(self._fd)
        finally:
            self.abort()

    def abort(self) -> None:
        """Closes without checks; the file is unusable unless `close` called this."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._pool.close()

    def __enter__(self) -> StreamedSave:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self.close() if exc_type is None else self.abort()


def streamed_bytes(skeleton: object) -> int:
    """Upper estimate of the size of a streamed file, without its real tensors, in bytes."""
    sizes: list[int] = []
    _map_specs(skeleton, lambda _, spec: sizes.append(spec.num_bytes + _RECORD_OVERHEAD_BYTES))
    return sum(sizes) + MIB


class MappedFile:
    """A `torch.save` file opened through a private file mapping: no tensor takes memory until it is read.

    Drop what was read with `release`; without that a resume's resident set grows to the size of the file.

    Runs pickled code, like every loader of DeepSpeed checkpoints: their pickles hold DeepSpeed's own classes and the
    user's client state.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self.content: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        self._ranges = _mapped_ranges(os.path.realpath(path))
        self._records: dict[int, Record] = {}
        self._pool: Crc32Pool | None = None

    def verify_from_now(self) -> None:
        """From here on `verify` compares with the CRCs in the file, which must be true ones (`StreamedSave` writes
        such). What is no tensor, or a small one, is verified at once.

        Raises:
            DamagedFileError: its bytes are not those that were saved.
        """
        self._pool = Crc32Pool()
        with open(self.path, "rb") as file:
            for record in records_of(self.path):
                self._records[record.offset] = record
                if not _is_read_later(record):
                    file.seek(record.offset)
                    self._compare(record, memoryview(file.read(record.num_bytes)))

    def verify(self, tensor: Tensor) -> None:
        """Reads all of the record that a tensor of this file is of; a tensor that lies elsewhere is left alone.

        Raises:
            DamagedFileError: they are not the bytes that were saved.
        """
        storage = tensor.untyped_storage()
        at = self._offset_of(storage.data_ptr(), storage.nbytes())
        if at in self._records and _is_read_later(self._records[at]):
            content = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
            self._compare(self._records[at], memoryview(content).cast("B"))

    def _compare(self, record: Record, content: memoryview) -> None:
        if self._pool.crc32(content) != record.crc32:
            raise DamagedFileError(f"{self.path}: {record.name} is not what was saved there (its checksum differs)")

    def _offset_of(self, start: int, num_bytes: int) -> int | None:
        """Where in the file memory of this process comes from; None: from elsewhere."""
        for range_start, range_end, file_offset in self._ranges:
            if range_start <= start and start + num_bytes <= range_end:
                return start - range_start + file_offset
        return None

    def release(self, tensor: Tensor) -> None:
        """Gives back the memory behind a tensor of this file; a later read fetches it from the file again.

        A tensor that lies elsewhere is left alone. Changes made to the mapping are lost.
        """
        start, num_bytes = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if self._offset_of(start, num_bytes) is not None:
            # Whole pages only; one shared with a neighbour in the file is read again at worst.
            start, end = start & -mmap.PAGESIZE, (start + num_bytes) & -mmap.PAGESIZE
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _is_read_later(record: Record) -> bool:
    """Whether it is a tensor that is verified when it is asked for."""
    return record.name.startswith(_TENSORS) and record.num_bytes > _SMALL_BYTES


def _mapped_ranges(path: str) -> list[tuple[int, int, int]]:
    """(start, end, offset in the file) of address ranges of this process that map `path`; none where /proc does not
    tell (then nothing is released, nor verified)."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split(maxsplit=5) for line in lines]
    spans = [(row[0].split("-"), row[2]) for row in fields if len(row) == 6 and row[5] == path]
    return [(int(start, 16), int(end, 16), int(offset, 16)) for (start, end), offset in spans]


def _map_specs(node: Any, replace: Callable[[KeyPath, TensorSpec], Any], key_path: KeyPath = ()) -> Any:
    """The same containers with `replace(key_path, spec)` for each spec; other objects are kept as they are."""
    if isinstance(node, TensorSpec):
        return replace(key_path, node)
    if type(node) in (list, tuple):
        return type(node)(_map_specs(child, replace, (*key_path, index)) for index, child in enumerate(node))
    if isinstance(node, dict) and any(_holds_spec(child) for child in node.values()):
        return type(node)((key, _map_specs(child, replace, (*key_path, key))) for key, child in node.items())
    return node


def _holds_spec(node: Any) -> bool:
    if isinstance(node, dict):
        return any(_holds_spec(child) for child in node.values())
    if type(node) in (list, tuple):
        return any(_holds_spec(child) for child in node)
    return isinstance(node, TensorSpec)


def _marker(token: bytes, number: int) -> Tensor:
    return torch.frombuffer(bytearray(token + number.to_bytes(8, "little")), dtype=torch.uint8)
