"""The quantized all-reduce: mean gradients over ranks, with 8-bit codes between nodes.

For a bucket of n elements on M nodes of L ranks, part (l, m) belongs to the rank at position l of node m:

    inside a node    all-to-all of parts l in the gradient's precision, added in fp32         (only if L > 1)
    between nodes    all-to-all of parts m in 8-bit codes, decoded and added in fp32, divided
    between nodes    all-gather of the means in 10-bit codes
    inside a node    all-gather of decoded means in the gradient's precision                  (only if L > 1)

Two nodes need no results from each other: each gets the other's contribution whole (comm/between_nodes.py).

Error, with more than two. Each element is rounded twice, whatever the number of ranks: a node's contribution in 8
bits and the mean in 10. Were every contribution rounded once and added exactly, the error would be at most the mean of
the nodes' rounding errors (triangle inequality), and, their errors being independent, as large relative to the mean of
independent gradients as one rounding is to one gradient: e. The second rounding adds e / 4 in an independent
direction: sqrt(1 + 1/16) e = 1.03 e. A second rounding in 8 bits would make 1.41 e.

Contributions are added up in the order of nodes, and all ranks decode the same codes: identical bits.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from lazytrain_plugin.comm import threshold
from lazytrain_plugin.comm.between_nodes import coded_mean
from lazytrain_plugin.comm.hops import Hops
from lazytrain_plugin.comm.overlap import overlapped
from lazytrain_plugin.comm.owners import chunks_of, owners_are_cheaper, reduce_to_owners
from lazytrain_plugin.comm.parts import blocks_of_part, chunk_numel
from lazytrain_plugin.comm.stats import CommStats
from lazytrain_plugin.comm.topology import Topology
from lazytrain_plugin.errors import CommunicationError, ConfigError
from lazytrain_plugin.kernels import gradient_codes as codes

logger = logging.getLogger(__name__)


class Reduction:
    """A reduction under way; `wait` before the tensor is read or written."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Returns when the tensor holds the mean; on CUDA, when the current stream is made to wait for that.

        Raises CommunicationError if ranks could not exchange their gradients (on CUDA, NCCL's watchdog ends the
        process instead).
        """
        self._wait()


class QuantizedReducer:
    """Averages tensors over the ranks of a process group, in place.

    Every rank makes one at the same point of its program and reduces the same tensors in the same order.

    Args:
        group: default: all ranks.
        bits: 8, or 16 for full precision throughout (the same interface, to compare).
        topology: default: found with `node_key`. Where every rank is on one node, nothing is quantized.
        smallest_bucket_elements: smaller buckets are reduced in full precision; default: measured now, on all ranks.
        timeout_s: a collective that takes longer fails; default: the group's.
        device: of the gradients; default: the current CUDA device under NCCL, else the CPU.

    Raises:
        ConfigError: other bits. CommunicationError: a topology of another number of ranks, or a rank is gone.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        bits: int = 8,
        topology: Topology | None = None,
        smallest_bucket_elements: int | None = None,
        timeout_s: float | None = None,
        device: torch.device | None = None,
    ) -> None:
        if bits not in (8, 16):
            raise ConfigError(f"Gradients travel in 8 or 16 bits, not {bits}.")
        if device is None:
            on_gpu = "nccl" in str(dist.get_backend(group))
            device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._hops = Hops(group, topology, device, timeout_s)
        self._stats = CommStats()
        self._said: set[str] = set()
        self._failure: CommunicationError | None = None
        # Reductions overlap backward: on CUDA on a stream of their own, so that no kernel of backward waits for the
        # network; on the CPU, where collectives block, on one thread, which keeps their order.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._worker: concurrent.futures.ThreadPoolExecutor | None = None
        self._last: concurrent.futures.Future | None = None
        self.off_because = "bits: 16" if bits == 16 else "one node" if self._hops.across is None else None
        self.smallest_bucket_elements = smallest_bucket_elements or 0
        self.measured: list[tuple[int, float, float]] = []
        """What the threshold was chosen from: elements, seconds in full precision, seconds quantized."""
        if self.off_because is None and smallest_bucket_elements is None:
            self.smallest_bucket_elements, self.measured = threshold.measure(self._timed_run, self._hops.slowest)
            self._stats = CommStats()
        logger.info("gradient reduction: %s", self.describe())

    @property
    def topology(self) -> Topology:
        return self._hops.topology

    @property
    def world_size(self) -> int:
        return len(self._hops.ranks)

    def stats(self) -> CommStats:
        """A copy of the counters of this rank."""
        return self._stats.copy()

    def describe(self) -> str:
        where = self.topology.describe()
        if self.off_because is not None:
            return f"full precision ({self.off_because}), {where}"
        if self.smallest_bucket_elements >= threshold.NEVER:
            return f"full precision (measured: codes are not faster at any size on this link), {where}"
        inside = ", full precision inside a node" if self._hops.inside is not None else ""
        if self.topology.ranks_per_node is None:
            inside = " and, as nodes are of unequal size, inside them"
        return (
            f"8-bit codes between nodes{inside}, {where}; "
            f"buckets below {self.smallest_bucket_elements} elements in full precision"
        )

    def fallback_reason(self, tensor: torch.Tensor) -> str | None:
        """Why this tensor would be reduced in full precision; None if it would not."""
        if self.off_because is not None:
            return self.off_because
        if tensor.dtype not in codes.DTYPES:
            return f"{str(tensor.dtype).removeprefix('torch.')} tensor"
        return "small bucket" if tensor.numel() < max(1, self.smallest_bucket_elements) else None

    def reduce(self, tensor: torch.Tensor, divisor: float | None = None) -> None:
        """Sums `tensor` (any shape and dtype) over the ranks and divides it by `divisor`, by default their number.

        In place, in stream order on CUDA. Raises CommunicationError if ranks could not exchange their gradients.
        """
        if self._last is not None:
            concurrent.futures.wait([self._last])
        self._run(tensor, divisor)

    def reduce_async(
        self,
        tensor: torch.Tensor,
        divisor: float | None = None,
        then: Callable[[], None] | None = None,
        on_error: Callable[[Exception], None] | None = None,
    ) -> Reduction:
        """As `reduce`, beside the caller's work.

        `then` is called when it is done (on CUDA when it is queued, within its stream), `on_error` if it failed.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
            tensor.record_stream(self._stream)
            with torch.cuda.stream(self._stream):
                self._run_then(tensor, divisor, then, on_error)
                done = self._stream.record_event()
            return Reduction(lambda: torch.cuda.current_stream(tensor.device).wait_event(done))
        if self._worker is None:
            self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="lazytrain-comm")
        self._last = self._worker.submit(self._run_then, tensor, divisor, then, on_error)
        return Reduction(self._last.result)

    def count_fallback(self, tensor: torch.Tensor, reason: str, wire_dtype: torch.dtype | None = None) -> None:
        """Counts a full-precision all-reduce of `tensor`, done here or by the caller, and says so the first time.

        `wire_dtype`: what the caller sends; default: the tensor's own.
        """
        self._stats.full_precision_buckets += 1
        self._stats.fallbacks[reason] += 1
        if self._hops.nodes > 1:
            world = self.world_size
            sent_bytes = 2 * (world - 1) / world * tensor.numel() * (wire_dtype or tensor.dtype).itemsize
            self._stats.wire_bytes += round(sent_bytes / self._hops.ranks_per_node)
        if reason not in self._said and self.off_because is None:
            self._said.add(reason)
            logger.info("a gradient bucket of %d elements is reduced in full precision: %s", tensor.numel(), reason)

    def close(self) -> None:
        """Ends the thread and leaves the process groups to the next reducer; every rank calls it."""
        if self._worker is not None:
            self._worker.shutdown()
        self._hops.close(usable=self._failure is None)

    def _run_then(
        self,
        tensor: torch.Tensor,
        divisor: float | None,
        then: Callable[[], None] | None,
        on_error: Callable[[Exception], None] | None,
    ) -> None:
        try:
            self._run(tensor, divisor)
        except Exception as error:
            if on_error is not None:
                on_error(error)
            raise
        if then is not None:
            then()

    def reduces_to_owners(self, owned_elements: Sequence[int]) -> bool:
        """Whether `reduce_to_owners` would send codes, and fewer bytes than `reduce`, for so many elements per rank.

        Small buckets and one node: False.
        """
        if self.off_because is not None or sum(owned_elements) < max(1, self.smallest_bucket_elements):
            return False
        return owners_are_cheaper(owned_elements, self._hops.node_ranks)

    @torch.no_grad()
    def reduce_to_owners(self, owned: Sequence[torch.Tensor], divisor: float | None = None) -> None:
        """As `reduce` of tensors that only one rank needs each: ZeRO's partitions. No result travels.

        Args:
            owned: one flat, contiguous tensor per rank, of the same sizes on all ranks, in fp32, bf16 or fp16. That of
                this rank holds the mean afterwards; the others keep what they held.
            divisor: default: the number of ranks.

        Raises:
            CommunicationError: ranks could not exchange their gradients.
        """
        if self._last is not None:
            concurrent.futures.wait([self._last])
        if self._failure is not None:
            raise self._failure
        divisor = float(self.world_size if divisor is None else divisor)
        chunks = chunks_of(owned, self._hops.device.type)
        try:
            overlapped(reduce_to_owners(self._hops, chunk, divisor, self._stats) for chunk in chunks)
        except CommunicationError as error:
            self._failure = error
            raise
        self._stats.quantized_buckets += 1
        self._stats.quantized_elements += sum(tensor.numel() for tensor in owned)

    @torch.no_grad()
    def _run(self, tensor: torch.Tensor, divisor: float | None) -> None:
        if self._failure is not None:
            raise self._failure
        divisor = float(self.world_size if divisor is None else divisor)
        flat = tensor.detach().reshape(-1)  # a copy if the tensor is not contiguous
        try:
            reason = self.fallback_reason(flat)
            if reason is None:
                self._quantized(flat, divisor)
                self._stats.quantized_buckets += 1
                self._stats.quantized_elements += flat.numel()
            else:
                self._full(flat, divisor)
                self.count_fallback(flat, reason)
        except CommunicationError as error:
            self._failure = error
            raise
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view_as(tensor))

    def _full(self, flat: torch.Tensor, divisor: float) -> None:
        if flat.numel() == 0:
            return
        if flat.dtype.is_floating_point or flat.dtype.is_complex:
            flat.div_(divisor)  # before the sum, as DDP does: fp16 must not overflow where the mean would not
            self._hops.sum("full-precision all-reduce", flat)
        else:
            self._hops.sum("full-precision all-reduce", flat)
            flat.copy_(flat.div(divisor, rounding_mode="trunc"))

    def _quantized(self, flat: torch.Tensor, divisor: float) -> None:
        chunks = flat.split(chunk_numel(flat.numel(), flat.device.type))
        overlapped(self._steps(chunk, divisor) for chunk in chunks)

    def _steps(self, flat: torch.Tensor, divisor: float) -> Iterator[None]:
        """Reduces `flat`; yields where a collective is under way."""
        hops, numel = self._hops, flat.numel()
        nodes, ranks_per_node = hops.nodes, hops.ranks_per_node
        blocks = blocks_of_part(numel, nodes * ranks_per_node)
        part = blocks * codes.BLOCK
        shard = flat
        if hops.inside is not None:
            contributions, wait = self._exchange_inside(flat, part * nodes)
            yield
            wait()
            shard = contributions[0].to(torch.float32, copy=True)
            for contribution in contributions[1:]:
                shard += contribution

        means = flat if hops.inside is None else torch.empty(part * nodes, dtype=flat.dtype, device=flat.device)
        yield from coded_mean(hops, shard, blocks, divisor, means, self._stats)
        if hops.inside is None:
            return
        whole = part * nodes * ranks_per_node
        gathered = flat if whole == numel else torch.empty(whole, dtype=flat.dtype, device=flat.device)
        wait = hops.gather("all-gather inside a node", gathered, means, hops.inside)
        self._stats.node_bytes += (ranks_per_node - 1) * means.numel() * means.element_size()
        yield
        wait()
        if gathered is not flat:
            flat.copy_(gathered[:numel])

    def _exchange_inside(self, flat: torch.Tensor, shard_numel: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """Starts to collect what the node's ranks have of this rank's shard: [ranks_per_node, elements]."""
        hops = self._hops
        begins = range(0, hops.ranks_per_node * shard_numel, shard_numel)
        sizes = [max(0, min(shard_numel, flat.numel() - begin)) for begin in begins]
        mine = sizes[hops.position(hops.inside)]
        received = torch.empty(hops.ranks_per_node * mine, dtype=flat.dtype, device=flat.device)
        phase = "full-precision exchange inside a node"
        wait = hops.exchange(phase, received, flat, hops.inside, [mine] * hops.ranks_per_node, sizes)
        self._stats.node_bytes += (flat.numel() - mine) * flat.element_size()
        return received.view(hops.ranks_per_node, mine), wait

    def _timed_run(self, numel: int, quantized: bool) -> None:
        device = self._hops.device
        generator = torch.Generator(device).manual_seed(numel)
        values = torch.randn(numel, device=device, generator=generator).to(torch.bfloat16)
        (self._quantized if quantized else self._full)(values, 1.0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
