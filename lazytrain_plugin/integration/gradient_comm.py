"""LazyTrain's gradient reduction in DeepSpeed's own engine, ZeRO stages 0, 1 and 2.

DeepSpeed funnels the gradients of stage 0 through `engine.allreduce_bucket` and those of stages 1 and 2 through
`optimizer.allreduce_bucket` (with `"reduce_scatter": false`, `optimizer.gradient_reduction_w_predivide`). These methods
are replaced on the one engine. DeepSpeed's buckets, hooks, streams and accumulation stay as they are, and what is not
worth quantizing goes through the method that was there.

At stages 1 and 2 DeepSpeed all-reduces slices of which one rank each keeps the result
(`optimizer.allreduce_and_copy_with_multiple_ranks`); where that is fewer bytes, they travel to that rank only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from lazytrain_plugin.comm.reducer import QuantizedReducer
from lazytrain_plugin.comm.stats import CommStats
from lazytrain_plugin.comm.topology import Topology
from lazytrain_plugin.config.schema import LazyTrainConfig

logger = logging.getLogger(__name__)


class GradientComm:
    """The reducers of one engine, one for each process group that reduces gradients (experts have their own).

    `engine.lazytrain_gradient_comm` holds it.
    """

    def __init__(self, engine: Any, config: LazyTrainConfig) -> None:
        self._engine = engine
        self._optimizer = engine.optimizer
        self._config = config
        self._reducers: dict[tuple[int, ...], QuantizedReducer] = {}
        # All ranks are here now; a reducer made in the middle of backward would measure beside compute.
        self._reducer(engine.seq_data_parallel_group)

    @classmethod
    def attach(cls, engine: Any, config: LazyTrainConfig) -> GradientComm | None:
        """Replaces the reduction of `engine`, on every rank at the same point; None if there is nothing to replace."""
        if dist.get_world_size() == 1 or config.wire_gradient_bits == 16:
            bits = f"{config.wire_gradient_bits} bits, {config.fidelity} fidelity"
            why = "one rank" if dist.get_world_size() == 1 else bits
            logger.info("gradient_comm changes nothing (%s): DeepSpeed's own gradient reduction", why)
            return None
        comm = cls(engine, config)
        comm._replace()
        engine.lazytrain_gradient_comm = comm
        logger.info(
            "active: DeepSpeed's engine at ZeRO stage %d with LazyTrain's gradient reduction",
            engine.zero_optimization_stage(),
        )
        return comm

    def stats(self) -> CommStats:
        """The counters of this rank over all process groups."""
        total = CommStats()
        for reducer in self._reducers.values():
            total += reducer.stats()
        return total

    def _reducer(self, group: dist.ProcessGroup) -> QuantizedReducer:
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._reducers:
            wanted = self._config.gradient_comm
            topology = None
            if wanted.ranks_per_node is not None:
                Topology.consecutive(dist.get_world_size(), wanted.ranks_per_node)  # raises if it can't be
                topology = Topology.from_keys([rank // wanted.ranks_per_node for rank in ranks])
            self._reducers[ranks] = QuantizedReducer(
                group,
                topology=topology,
                smallest_bucket_elements=wanted.smallest_bucket_elements,
                device=torch.device(self._engine.device),
            )
        return self._reducers[ranks]

    def _replace(self) -> None:
        self._engine_bucket = self._engine.allreduce_bucket
        self._engine.allreduce_bucket = self._allreduce_engine_bucket
        if isinstance(self._optimizer, DeepSpeedZeroOptimizer):
            self._optimizer_bucket = self._optimizer.allreduce_bucket
            self._optimizer_tensor = self._optimizer.gradient_reduction_w_predivide
            self._optimizer_slices = self._optimizer.allreduce_and_copy_with_multiple_ranks
            self._optimizer.allreduce_bucket = self._allreduce_optimizer_bucket
            self._optimizer.allreduce_and_copy_with_multiple_ranks = self._reduce_optimizer_slices
            self._optimizer.gradient_reduction_w_predivide = self._allreduce_optimizer_tensor

    def _allreduce_engine_bucket(
        self, bucket: Sequence[torch.Tensor], dp_group: dist.ProcessGroup, dp_world_size: float | None = None
    ) -> torch.Tensor:
        reducer, flat = self._reducer(dp_group), self._engine.flatten(bucket)
        if reason := reducer.fallback_reason(flat):
            reducer.count_fallback(flat, reason, self._engine.communication_data_type)
            return self._engine_bucket(bucket, dp_group, dp_world_size)
        world_size = reducer.world_size if dp_world_size is None else dp_world_size
        sent = flat.to(self._engine.communication_data_type)
        reducer.reduce(sent, world_size if self._engine.gradient_average else 1.0)
        return flat if sent is flat else flat.copy_(sent)

    def _allreduce_optimizer_bucket(
        self,
        bucket: Sequence[torch.Tensor],
        communication_data_type: torch.dtype,
        rank: int | None = None,
        log: Any = None,
        divide: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> torch.Tensor:
        group = self._optimizer.dp_process_group if process_group is None else process_group
        reducer, flat = self._reducer(group), self._optimizer.flatten(bucket)
        if reason := reducer.fallback_reason(flat):
            reducer.count_fallback(flat, reason, communication_data_type)
            return self._optimizer_bucket(bucket, communication_data_type, rank, log, divide, process_group)
        if rank is not None:
            sizes = [flat.numel() if owner == rank else 0 for owner in range(reducer.world_size)]
            if reducer.reduces_to_owners(sizes):
                sent = flat.to(communication_data_type)
                reducer.reduce_to_owners([sent if size else sent[:0] for size in sizes], self._divisor(reducer, divide))
                return sent if sent is flat else flat.copy_(sent)
        # Every rank gets the mean, also where DeepSpeed would send it to `rank` alone: the others ignore it.
        return self._reduced(reducer, flat, communication_data_type, divide)

    def _reduce_optimizer_slices(
        self,
        small_bucket: Sequence[torch.Tensor],
        communication_data_type: torch.dtype,
        log: Any = None,
        divide: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_ranks: Sequence[int | frozenset[int]] = (),
        output_bucket: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Slices of gradients, each kept by the ranks in `bucket_ranks`, and added to its output if it has one."""
        group = self._optimizer.dp_process_group if process_group is None else process_group
        reducer = self._reducer(group)
        owners = [set(ranks) if isinstance(ranks, frozenset) else {ranks} for ranks in bucket_ranks]
        slices_of: list[list[torch.Tensor]] = [[] for _ in range(reducer.world_size)]
        for part, ranks in zip(small_bucket, owners, strict=True):
            slices_of[min(ranks)].append(part)
        sizes = [sum(part.numel() for part in parts) for parts in slices_of]
        if any(len(ranks) > 1 for ranks in owners) or not reducer.reduces_to_owners(sizes):
            options = {} if output_bucket is None else {"output_bucket": output_bucket}
            self._optimizer_slices(
                small_bucket, communication_data_type, log, divide, process_group, bucket_ranks, **options
            )
            return
        owned = [
            self._optimizer.flatten(parts).to(communication_data_type)
            if parts
            else small_bucket[0].new_empty(0, dtype=communication_data_type)
            for parts in slices_of
        ]
        reducer.reduce_to_owners(owned, self._divisor(reducer, divide))
        rank = dist.get_rank(group)
        outputs = output_bucket or [None] * len(small_bucket)
        mine = [(part, out) for part, ranks, out in zip(small_bucket, owners, outputs, strict=True) if rank in ranks]
        reduced = owned[rank].split([part.numel() for part, _ in mine])
        for (part, output), mean in zip(mine, reduced, strict=True):
            self._optimizer._add_to_grad_partition_buffer(output, mean.view_as(part))
            part.copy_(mean.view_as(part))
            if part.is_cuda:  # DeepSpeed's reduction stream, where this may run, writes what backward's allocated
                part.record_stream(torch.cuda.current_stream(part.device))

    def _allreduce_optimizer_tensor(self, tensor: torch.Tensor, communication_data_type: torch.dtype) -> torch.Tensor:
        reducer = self._reducer(self._optimizer.dp_process_group)
        if reason := reducer.fallback_reason(tensor):
            reducer.count_fallback(tensor, reason, communication_data_type)
            return self._optimizer_tensor(tensor, communication_data_type)
        return self._reduced(reducer, tensor, communication_data_type, True)

    def _reduced(
        self, reducer: QuantizedReducer, flat: torch.Tensor, communication_data_type: torch.dtype, divide: bool
    ) -> torch.Tensor:
        """The mean in the dtype that DeepSpeed would have sent, which it may add up further; `flat` gets it too."""
        sent = flat.to(communication_data_type)
        reducer.reduce(sent, self._divisor(reducer, divide))
        if sent is not flat:
            flat.copy_(sent)
        return sent

    def _divisor(self, reducer: QuantizedReducer, divide: bool) -> float:
        world_size = reducer.world_size / float(self._optimizer.sequence_parallel_size)
        return world_size if divide and self._optimizer.gradient_average else 1.0
