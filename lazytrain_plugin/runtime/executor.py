"""Carries a plan out: leases, prefetch, gradients home, lazy exact updates. It decides nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from lazytrain_plugin.comm.between_nodes import BetweenNodes
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.runtime import placing, streamed_module
from lazytrain_plugin.runtime.activation_store import ActivationStore
from lazytrain_plugin.runtime.cpu_update import CpuUpdates
from lazytrain_plugin.runtime.discovery import Discovery
from lazytrain_plugin.runtime.divided_updates import DividedUpdates
from lazytrain_plugin.runtime.gradient_exchange import GradientExchange
from lazytrain_plugin.runtime.gradients import GradientSink
from lazytrain_plugin.runtime.homes import UnitHome
from lazytrain_plugin.runtime.layout import UnitTensor
from lazytrain_plugin.runtime.node import UnitCall
from lazytrain_plugin.runtime.norms import GradientNorm, LaneNorm, TorchNorm
from lazytrain_plugin.runtime.nvme.activations import NvmeActivations
from lazytrain_plugin.runtime.nvme.stores import NvmeStores
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.runtime.outside_changes import OutsideChanges
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.resident_updates import ResidentUpdates
from lazytrain_plugin.runtime.run_order import AGAIN, BACKWARD, FORWARD, RunOrder
from lazytrain_plugin.runtime.shared_updates import SharedUpdates
from lazytrain_plugin.runtime.side_outputs import NoSideOutputs, SideOutputs
from lazytrain_plugin.runtime.slots import Outbox, WeightSlots
from lazytrain_plugin.runtime.step_updates import StepUpdates
from lazytrain_plugin.runtime.streamed_updates import StreamedUpdates
from lazytrain_plugin.runtime.streams import Streams
from lazytrain_plugin.runtime.unit import Unit
from lazytrain_plugin.runtime.unit_table import UnitTable
from lazytrain_plugin.runtime.update import ClientOptimizer, NativeAdamW, read_scalars
from lazytrain_plugin.runtime.weights_between_nodes import WeightsBetweenNodes
from lazytrain_plugin.runtime.worker import UpdateWorker


class Executor:
    """Runs a model's units under a `PlacementPlan`.

    Args:
        model: its weights become homes, unit by unit; parameter objects stay the same.
        discovery: what is streamed (runtime/discovery.py).
        device: where units run.
        dtypes: dtype of each weight at home; a trained fp32 weight that becomes bf16 keeps its fp32 value as master.
        optimizer: the client's; its live `param_groups` give hyper-parameters. None: nothing is trained.
        updater: how units are updated; None: nothing is trained.
        side_outputs: how a framework collects tensors from inside a unit.
        prepare_inputs: changes a unit's arguments before a differentiable run (drops caches).
        nvme: where a plan's NVMe tier is; the executor closes it.
        transfer_delay_s: makes every transfer late; for race tests.
        ranks: who trains this model together; every one of them makes an executor at the same point, and then calls
            `place`, `begin_forward` for training, `end_backward` and `step` as the others do. None: one rank.
        average_gradients: over ranks; False: the sum.
        between_nodes: how nodes average gradients, of parts if the ranks divide states over the job; default: in fp32.
    """

    def __init__(
        self,
        model: nn.Module,
        discovery: Discovery,
        device: torch.device,
        *,
        dtypes: dict[nn.Parameter, torch.dtype],
        optimizer: torch.optim.Optimizer | None = None,
        updater: NativeAdamW | ClientOptimizer | None = None,
        side_outputs: SideOutputs | None = None,
        prepare_inputs: Callable[[tuple, dict], tuple[tuple, dict]] | None = None,
        nvme: NvmeTier | None = None,
        transfer_delay_s: float = 0.0,
        ranks: RankGroup | None = None,
        average_gradients: bool = True,
        between_nodes: BetweenNodes | None = None,
    ) -> None:
        self.model = model
        self.ranks = ranks
        self.device = device
        self.optimizer = optimizer
        self.updater = updater
        self.side_outputs = side_outputs or NoSideOutputs()
        self.prepare_inputs = prepare_inputs or (lambda args, kwargs: (args, kwargs))
        self.streams = Streams(device, transfer_delay_s=transfer_delay_s)
        self.worker = UpdateWorker(begin=self.streams.use_device)
        self.activations = ActivationStore(self.streams, 1)
        self.graph_root = torch.empty(0, device=device, requires_grad=True)
        """Input of every unit node, so that one exists even where no argument requires grad (a frozen prefix)."""
        self.on_backward: Callable | None = None
        """Gets a call whose forward ran again, its inputs and its outputs' gradients, while the unit is leased."""
        self.plan: PlacementPlan | None = None
        self._slots: WeightSlots | None = None
        self._outside = OutsideChanges(self)
        self._hooks: list = []
        self._find_tensors(discovery, dtypes)
        native = isinstance(updater, NativeAdamW)
        self._norm = TorchNorm() if not native else LaneNorm(len(self.trained_tensors), device)
        self._sink = GradientSink(self.streams, self.worker, self._norm)
        self._nvme = NvmeStores(nvme, native=native, pin=self.streams.is_cuda, ranks=ranks)
        if nvme is not None:
            self.activations.nvme = NvmeActivations(self.streams, nvme)
        self._streamed_updates = StreamedUpdates(self.streams) if ranks is None else DividedUpdates(self.streams)
        if ranks is None:
            self._arrivals, self._updates = self._sink, CpuUpdates(self, self._nvme)
        else:
            between = between_nodes or BetweenNodes(ranks.hops, 16, of_parts=ranks.shards_job)
            self._arrivals = GradientExchange(
                ranks, between, self._sink, self.streams, self._table, average=average_gradients
            )
            weights = WeightsBetweenNodes(ranks, self.streams, between.count_weights) if ranks.shards_job else None
            self._updates = SharedUpdates(self, self._nvme, ranks, self._streamed_updates, weights)
        self.update_threads = self.worker, *self._updates.own_threads
        divides = ranks is not None and ranks.num_parts > 1
        self._step_updates = StepUpdates(
            self,
            self._updates,
            self._streamed_updates,
            ResidentUpdates(self, ranks, between.count_weights) if divides else None,
            self._outside.settle_asked,
            self._prefetch_first,
        )

    def _find_tensors(self, discovery: Discovery, dtypes: dict[nn.Parameter, torch.dtype]) -> None:
        groups = self.optimizer.param_groups if self.optimizer is not None and self.updater is not None else []
        least = self.updater.least_coded_numel if isinstance(self.updater, NativeAdamW) else 0
        table = self._table = UnitTable(self.model, discovery, dtypes, groups, least_coded_numel=least)
        self.units, self.stem, self.owner = table.units, table.stem, table.owner
        self.all_units = [*self.units, *self.stem]
        self.trained_tensors, self.update_order = table.trained_tensors, table.update_order

    @property
    def exchange(self) -> GradientExchange:
        """Where gradients meet those of other ranks; with several ranks only."""
        return self._arrivals

    @property
    def closed(self) -> bool:
        return self._hooks is None

    # Placement.

    @torch.inference_mode(False)  # an evaluation may be what comes first, and training uses the same memory
    def place(self, plan: PlacementPlan) -> None:
        """Puts everything where `plan` says, unit by unit; also moves a placed model to another plan, bit for bit.

        A batch larger than any before may come as a window's second: the gradients that have arrived move along.
        """
        self.flush()
        self.share_changes()  # homes hand over what ranks have in common
        native = isinstance(self.updater, NativeAdamW)
        self._streamed_updates.check(plan, native=native or self.updater is None)
        self._slots = None
        placing.sum_up(self.all_units, plan, self._sink, self.ranks)
        self._nvme.begin(plan, self.all_units)
        make_home = partial(UnitHome, device=self.device, native=native, nvme=self._nvme, ranks=self.ranks)
        placing.move_all(self.all_units, plan, make_home, self.streams.record, self.ranks)
        self._nvme.end(self.all_units)
        self._nvme.write_for_others()
        if before_first := self.plan is None:
            self._install()
            if self.ranks is not None:
                placing.begin_alike(self.all_units, self.ranks)
        self.plan = plan
        self._make_slots(plan)
        if before_first and self.streams.is_cuda:
            torch.cuda.empty_cache()

    def _make_slots(self, plan: PlacementPlan) -> None:
        self._order = RunOrder(self.units)
        streamed = self._order.streamed
        self._num_slots = min(plan.weight_slots, len(streamed) + 1)
        if streamed:
            nbytes = max(unit.layout.weight_bytes for unit in streamed)
            self._slots = WeightSlots(self.streams, self._num_slots, nbytes)
        self._streamed_updates.make_slots(plan, self.update_order, self._slots)
        self._sink.outbox.trim(0)
        self._sink.outbox = Outbox(self.streams, self._arrivals.use_slots(plan.gradient_slots - 1))
        self.activations.follow(plan)

    def _install(self) -> None:
        for unit in self.units:
            streamed_module.install(unit.module, self, unit)
        placing.move_buffers(self.model, self.device)
        for unit in self.all_units:
            for tensor in unit.trained:
                hook = partial(self._take_gradient, unit, tensor)
                self._hooks.append(tensor.parameter.register_post_accumulate_grad_hook(hook))

    # Running units.

    def run_unit(self, unit: Unit, args: tuple, kwargs: dict):
        """The unit's forward; differentiable where grad mode, its weights or its inputs ask for it."""
        if torch.is_grad_enabled():
            args, kwargs = self.prepare_inputs(args, kwargs)
            call = UnitCall(self, unit, args, kwargs)
            trains = any(tensor.parameter.requires_grad for tensor in unit.gradient_targets())
            if trains or any(tensor.requires_grad for tensor in call.inputs):
                return call.run()
        with torch.no_grad(), self.lease(unit, backward=False):
            return unit.original_forward(*args, **kwargs)

    @contextlib.contextmanager
    def lease(self, unit: Unit, *, backward: bool, again: bool = False) -> Iterator[None]:
        """Within: the unit's parameters are on the device and up to date. Whatever happens, they go home after.

        `again`: in backward, to run forward once more for a later unit (runtime/dropped_inputs.py).
        """
        self.streams.phase = phase = AGAIN if again else BACKWARD if backward else FORWARD
        if unit.home.on_gpu or unit.slot is not None:
            if unit.slot is None:
                self.settle(unit)
            self._prefetch_after(unit, phase)
            with self.streams.computing(f"{phase} {unit.name}"):
                yield
            return
        idle_since = self.streams.record(timing=True)
        # Weights that were not updated early enough could not be fetched early enough either.
        late = unit.streamed_update is not None or unit.update_ticket is not None and not self._slots.holds(unit)
        slot = None
        try:
            if unit.streamed_update is None:
                self.settle(unit)
            else:
                unit.streamed_update.begin()  # in the slot; the way home may take longer
            slot = self._slots.acquire(unit, "update" if late else "weights", idle_since)
            unit.point_to(slot)
            if backward and self._sink.last_micro_batch:
                self._slots.leave_home_alone_after_backward()
            self._prefetch_after(unit, phase)
            with self.streams.computing(f"{phase} {unit.name}"):
                yield
        finally:
            unit.point_home()
            if slot is not None:
                self._slots.release(slot)

    def _prefetch_after(self, unit: Unit, phase: str) -> None:
        """Starts the transfers and streamed updates of the units that run next."""
        if self._slots is not None:
            upcoming = self._order.upcoming(unit, phase)
            window = upcoming[: self._num_slots - 1]
            self._prefetch(window, frozenset((unit, *window)))
            self._nvme.read_weights_ahead(soon for soon in upcoming if not self._slots.holds(soon))
        self._streamed_updates.follow(unit, phase, ends_window=unit is self.units[0] and self._sink.last_micro_batch)

    def _prefetch(self, window: list[Unit], needed: frozenset[Unit]) -> None:
        """Starts the transfers of weights that are up to date, or are updated here; `needed` ones stay in slots."""
        for soon in window:
            if soon.update_ticket is None or soon.update_ticket.done:
                self._slots.prefetch(soon, needed)

    def _prefetch_first(self) -> None:
        """As `_prefetch_after`, before any unit runs."""
        if self._slots is not None:
            first = self._order.streamed[: self._num_slots]
            self._prefetch(first, frozenset(first))

    def settle(self, unit: Unit) -> None:
        """Waits until the unit's last update is done and visible to the compute stream."""
        if unit.streamed_update is not None:
            self._streamed_updates.finish(unit)
        elif unit.update_ticket is not None:
            with self.streams.host_waits("update"):
                unit.update_ticket.wait()
        else:
            return
        if unit.publish_event is not None:
            self.streams.compute_waits(unit.publish_event, "update")
            unit.publish_event = None
        unit.settle()

    # Gradients and the step.

    def set_last_micro_batch(self, last: bool) -> None:
        self._sink.last_micro_batch = last

    def deliver(self, unit: Unit, gradients: list[tuple[UnitTensor, torch.Tensor]]) -> None:
        """Takes what one backward of a unit produced; shared tensors go to the unit that owns them."""
        own = [(tensor, gradient) for tensor, gradient in gradients if self.owner[tensor.parameter][0] is unit]
        self._arrivals.deliver(unit, own)
        for tensor, gradient in gradients:
            owner = self.owner[tensor.parameter][0]
            if owner is not unit:
                self._arrivals.deliver(owner, [(tensor, gradient)])

    def _take_gradient(self, unit: Unit, tensor: UnitTensor, parameter: nn.Parameter) -> None:
        """A gradient from outside every unit's node: all of a stem weight's, and a penalty's on a streamed weight."""
        gradient, parameter.grad = parameter.grad, None
        self._arrivals.deliver(unit, [(tensor, gradient.to_dense() if gradient.is_sparse else gradient)])

    def end_backward(self) -> None:
        """Called after each backward."""
        self._arrivals.end_backward()

    def discard_gradients(self) -> None:
        """Forgets the gradients of a window that is not going to be stepped."""
        self._arrivals.discard([unit for unit in self.all_units if unit.arrived])

    def begin_forward(self, *, training: bool = True) -> None:
        """Called before the model runs: books the time since the last update, and takes over changed weights.

        `training`: every rank calls it. Other forwards are each rank's own.
        """
        if self._slots is not None:
            self._slots.end_leases()  # a Ctrl-C can strike while one is being given back
        for unit in self.units:
            if unit.slot is not None:
                unit.point_home()
        self.streams.run_backward_on_one_thread(True)
        self._table.check_groups(self.optimizer)
        self._outside.before_forward(self.ranks if training else None)
        self.streams.end_idle()

    def step(self, max_norm: float) -> tuple[GradientNorm, bool]:
        """Fixes this step's scalars and starts the updates; returns before they are done.

        Args:
            max_norm: limit of the global gradient norm; 0 or less: no clipping.

        Returns:
            The norm before clipping, and whether the step is applied: a non-finite gradient skips it.
        """
        self.streams.begin_idle()
        self.share_changes()
        self._outside.before_update()
        norm = self._arrivals.complete(self.all_units)
        self.streams.trace.end_step()
        arrivals = {unit: unit.arrived for unit in self.update_order if unit.arrived}
        for unit in arrivals:
            unit.arrived = {}
        self._outside.suspect(u for u in self.all_units if u not in arrivals or not norm.is_finite)
        if not norm.is_finite:
            norm.report()
            for unit in arrivals:
                unit.home.drop_gradients()
            return norm, False
        if not self.updater.native:
            self.worker.drain()  # the last step's updates may still write to the groups
        scalars = read_scalars(self.optimizer, norm.clip_factor(max_norm))
        self._nvme.read_ahead(arrivals)
        self._step_updates.begin(arrivals, scalars)
        return norm, True

    def forget_copies(self, unit: Unit) -> None:
        """The unit's weights at home were changed by hand: its copy in a slot is stale."""
        if self._slots is not None:
            self._slots.drop(unit)
        if unit.home.nvme_weights is not None:
            unit.home.nvme_weights.forget_staged()

    def share_changes(self) -> None:
        """Several ranks, all here: weights that were changed from outside in one of them change for all."""
        if self.ranks is not None and self.plan is not None:
            self._outside.take_over()
            self._outside.share(self.ranks)

    def flush(self) -> None:
        """Waits until every update is done and every parameter shows its new value; takes changed weights over."""
        self._wait()
        self._nvme.write_for_others()
        if self.plan is not None:
            self._outside.take_over()
            self._outside.suspect(self.all_units)

    def _wait(self) -> None:
        self._streamed_updates.begin_all()
        for unit in self.all_units:
            self.settle(unit)
        self.worker.drain()
        self.streams.synchronize()

    def close(self) -> None:
        """Gives threads, page locks and staging memory back; the model keeps true weights. Safe to call twice."""
        if self.closed:
            return
        try:
            self._wait()
        finally:
            self.worker.close()
            self._updates.close()
            self._arrivals.close()
            for hook in self._hooks:
                hook.remove()
            self._hooks = None
            self._slots = None
            self._streamed_updates.close()
            self._sink.outbox.trim(0)
            self.activations.close()
            self.streams.run_backward_on_one_thread(False)
            self._nvme.close()
            for unit in self.all_units:
                if unit.module is not None:
                    streamed_module.remove(unit.module, unit)
                if unit.home is not None:
                    unit.home.release()
