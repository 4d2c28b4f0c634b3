"""What NCCL asks of collectives and gloo does not, held against every multi-rank test on the CPU.

- Device tensors only (memory of a `HostBuffer` is none), of a dtype that NCCL has, dense.
- Each rank starts the same collectives, of fitting sizes, in the same order on every process group.
- Between start and `wait` the result is not there, and what is sent may still be read: results are NaN until then, and
  what was sent must not have changed.
- Every collective that was started is waited for.

Groups that were made for gloo are for what is small and on the host; of those only the order counts.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist

from lazytrain_plugin.comm import hops
from lazytrain_plugin.runtime import rank_group
from lazytrain_plugin.runtime.host_memory import HostBuffer

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it
DTYPES = {
    *(torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


class Under:
    """A collective that was started."""

    def __init__(self, rules: Rules, work, results: list, sent: list) -> None:
        self._rules, self._work, self._results, self._sent = rules, work, results, sent
        rules.started.append(self)

    def wait(self, *args) -> bool:
        done = self._work.wait(*args)
        if self in self._rules.started:
            self._rules.started.remove(self)
            for given, copy in self._sent:
                assert same_bytes(given, copy), "what is sent was changed before the collective was waited for"
            for target, found in self._results:
                target.copy_(found)
        return done


class Rules:
    def __init__(self) -> None:
        self.seen: dict[tuple, list[tuple]] = defaultdict(list)
        """Collectives in order, by group."""
        self.started: list[Under] = []
        self._host_groups: set = set()
        self._host_memory: weakref.WeakSet[HostBuffer] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._new_buffer = HostBuffer.__init__

    def __getattr__(self, name: str):
        """This stands for `torch.distributed` where LazyTrain's collectives are."""
        return getattr(dist, name)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with (
            mock.patch.object(hops, "dist", self),
            mock.patch.object(rank_group, "dist", self),
            mock.patch.object(hops, "_all_gather", self.gather),
            mock.patch.object(HostBuffer, "__init__", lambda *args, **options: self.new_buffer(*args, **options)),
        ):
            yield
        assert not self.started, f"{len(self.started)} collectives were never waited for"

    def new_group(self, *args, **options):
        group = dist.new_group(*args, **options)
        if options.get("backend") == "gloo":
            self._host_groups.add(group)
        return group

    def new_buffer(self, buffer: HostBuffer, *args, **options) -> None:
        self._new_buffer(buffer, *args, **options)
        self._host_memory.add(buffer)

    def note(self, group, *what) -> None:
        group = group or dist.group.WORLD
        key = tuple(dist.get_process_group_ranks(group)), group.group_name
        with self._lock:
            self.seen[key].append(tuple(str(item) for item in what))

    def check(self, group, *tensors: torch.Tensor) -> None:
        if group in self._host_groups:
            return
        for tensor in tensors:
            assert tensor.dtype in DTYPES, f"NCCL has no {tensor.dtype}"
            assert tensor.is_contiguous() and not tensor.is_sparse
            for buffer in self._host_memory:
                inside = tensor.data_ptr() - buffer._bytes.data_ptr()
                assert not (tensor.numel() and 0 <= inside < buffer.nbytes), "host memory in a collective of the GPUs"

    # The collectives.

    def all_to_all_single(self, output, input, output_split_sizes=None, input_split_sizes=None, group=None,
                          async_op=False):  # fmt: skip
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.check(group, output, input)
        for tensor, sizes in ((output, output_split_sizes), (input, input_split_sizes)):
            assert sum(sizes) == len(tensor) if sizes else len(tensor) % size == 0
        received, sent = (
            list(sizes or [len(tensor) // size] * size)
            for tensor, sizes in ((output, output_split_sizes), (input, input_split_sizes))
        )
        self.note(group, "all_to_all", input.dtype, rank, received, sent)
        run = lambda out, mine: dist.all_to_all_single(  # noqa: E731
            out, mine, output_split_sizes, input_split_sizes, group=group, async_op=async_op
        )
        return self._start(run, output, input, async_op)

    def gather(self, output, input, group=None, async_op=False):
        self.check(group, output, input)
        assert output.numel() == dist.get_world_size(group) * input.numel() and output.dtype == input.dtype
        self.note(group, "gather", input.dtype, input.numel())
        run = lambda out, mine: all_gather_single(out, mine, group=group, async_op=async_op)  # noqa: E731
        return self._start(run, output, input, async_op)

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        self.check(group, tensor)
        self.note(group, "all_reduce", tensor.dtype, tensor.numel(), op)
        if not async_op:
            return dist.all_reduce(tensor, op=op, group=group)
        mine = tensor.clone()
        spoil(tensor)
        work = dist.all_reduce(mine, op=op, group=group, async_op=True)
        return Under(self, work, [(tensor, mine)], [])

    def all_gather(self, tensor_list, tensor, group=None, async_op=False):
        self.check(group, tensor, *tensor_list)
        self.note(group, "all_gather", tensor.dtype, tensor.numel())
        return dist.all_gather(tensor_list, tensor, group=group, async_op=async_op)

    def broadcast(self, tensor, src=None, group=None, async_op=False, **options):
        self.check(group, tensor)
        self.note(group, "broadcast", tensor.dtype, tensor.numel(), src)
        return dist.broadcast(tensor, src=src, group=group, async_op=async_op, **options)

    def _start(self, run, output, input, async_op):
        if not async_op:
            return run(output, input)
        found, mine = torch.empty_like(output), input.clone()
        spoil(output)
        return Under(self, run(found, mine), [(output, found)], [(input, mine)])

    def compare(self) -> None:
        """Every rank calls it at the end."""
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, dict(self.seen))
        for key, mine in self.seen.items():
            for rank in key[0]:
                theirs = everyone[rank].get(key, [])
                assert [fits(*pair) for pair in zip(mine, theirs, strict=True)].count(False) == 0, (key, mine, theirs)


def fits(mine: tuple, theirs: tuple) -> bool:
    """Whether two ranks started the same collective."""
    if mine[0] != "all_to_all":
        return mine == theirs
    (_, dtype, rank, received, sent), (_, other_dtype, other, other_received, other_sent) = mine, theirs
    return dtype == other_dtype and sizes(received)[int(other)] == sizes(other_sent)[int(rank)] and (
        sizes(sent)[int(other)] == sizes(other_received)[int(rank)]
    )  # fmt: skip


def sizes(text: str) -> list[int]:
    return [int(size) for size in text.strip("[]").split(",")]


def spoil(tensor: torch.Tensor) -> None:
    """Every byte is 255: NaN of all kinds of floats."""
    if tensor.numel():
        tensor.view(-1).view(torch.uint8).fill_(255)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not a.numel() or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
