"""The one autograd node of a unit call: lease weights, run, keep or recompute, hand gradients over.

[Note: weights in kept graphs] A kept graph must not hold the slot's memory: the slot is reused by other units. The
pack hook replaces a saved tensor that lies in the slot by its position; unpack finds it in the slot leased now.

[Note: who holds what] Between forward and backward a call holds, for the outer graph, its inputs (recompute) or its
own graph (keep), and what operators returned (the strategies between, runtime/selective.py). What the plan rests off
the device is replaced by handles of the call's parcel (runtime/activation_store.py). A kept graph is known by its
edges: its outputs are the next unit's inputs, and its leaves this unit's, so neither may be held here.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from lazytrain_plugin.kernels.fused_saves import FusedSaves
from lazytrain_plugin.profile.attention_core import AttentionCore
from lazytrain_plugin.runtime.activation_store import Handle, Parcel
from lazytrain_plugin.runtime.dropped_inputs import DroppedInputs, drop_inputs, find_again
from lazytrain_plugin.runtime.forward_state import ForwardState
from lazytrain_plugin.runtime.local_graph import LocalGraph, audit, detached_leaves
from lazytrain_plugin.runtime.quantized_saves import (
    ATTENTION,
    FORMATS,
    UNSEEN,
    Codes,
    Encoder,
    KeptSaves,
    is_compiled,
    largest_numel,
    log_once,
    say_compiled,
)
from lazytrain_plugin.runtime.saved_hooks import address_of, drop, refuse_dropped, unpack_with
from lazytrain_plugin.runtime.selective import NOTHING, Recorder, Recording, Replay
from lazytrain_plugin.runtime.tail import WrongWayError
from lazytrain_plugin.runtime.tree import flatten_tensors
from lazytrain_plugin.vocab import MAY_BE_CODED, Activations, Tier

if TYPE_CHECKING:
    from lazytrain_plugin.runtime.executor import Executor
    from lazytrain_plugin.runtime.unit import Unit


class UnitCall:
    """One forward of one unit, and what its backward needs. A unit called twice has two of these."""

    def __init__(self, executor: Executor, unit: Unit, args: tuple, kwargs: dict) -> None:
        self.executor = executor
        self.unit = unit
        plan = unit.home.plan
        self.activations = plan.activations
        self.keep = plan.activations == Activations.KEEP
        self.boundary, self.saved = plan.boundary, plan.saved
        self.offloads_inputs = plan.boundary in (Tier.CPU, Tier.NVME)
        self.dropped: DroppedInputs | None = None
        self.offloads_saved = plan.saved != Tier.GPU and plan.activations != Activations.RECOMPUTE
        self.saved_bits, self.boundary_bits = plan.saved_bits, plan.boundary_bits
        self.is_coded = min(self.saved_bits, self.boundary_bits) < 16
        if self.is_coded and (unit.is_compiled or is_compiled(unit.module)):
            # What runs inside is hidden, attention included: see runtime/quantized_saves.py.
            say_compiled(unit.name, executor.activations.said)
            self.saved_bits, self.boundary_bits, self.is_coded = 16, 16, False
        self.saves_nothing = plan.activations == Activations.RECOMPUTE and not self.is_coded
        self.parcel: Parcel | None = None
        self.encoder: Encoder | None = None
        self.late: dict[int, int] = {}
        """Inputs that are encoded when the unit has run, and their versions before."""
        self.recording: Recording | None = None
        self.inputs, self.rebuild_inputs = flatten_tensors((args, kwargs))
        self.side_keys = executor.side_outputs.active_keys()
        self.stayed: tuple[torch.Tensor, ...] | None = None
        """What autograd saved, if it was asked for ahead of backward: in a checkpoint it gives each tensor once."""
        self.rebuild_outputs = None
        self.graph: LocalGraph | None = None
        if not self.keep:
            self.before = ForwardState(executor.device.type, self.inputs)

    def run(self):
        """The unit's outputs, attached to the outer graph by one node."""
        # From here on only autograd holds the inputs: it frees them as backward goes, while this object lives as long
        # as the loss does, which is often into the next step.
        inputs, self.inputs = self.inputs, []
        waits = self.unit.update_ticket is not None and not self.unit.update_ticket.done
        begin_s = time.perf_counter()
        outputs = _UnitNode.apply(self, self.executor.graph_root, *inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self.output_versions = [output._version for output in outputs]
        result, captured = self.rebuild_outputs(outputs)
        self.executor.side_outputs.append(captured)
        seconds = time.perf_counter() - begin_s
        self.executor.streams.trace.launched(self.unit.name, seconds, waited=waits)
        return result

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        with self.executor.lease(self.unit, backward=False):
            outputs = self.forward_keeping(inputs) if self.keep else self.forward_dropping(inputs)
            self.encode_late_inputs(inputs)
            self.differentiable = [output.requires_grad for output in outputs]
            outputs = [output.detach() for output in outputs]
        if self.parcel is not None:
            self.parcel.send()
        if self.encoder is not None:
            encoder, self.encoder = self.encoder, None
            encoder.close()
            log_once(
                self.unit.name, (self.saved_bits, self.boundary_bits), encoder.report, self.executor.activations.said
            )
        return outputs

    def forward_keeping(self, inputs) -> list[torch.Tensor]:
        store = self.executor.activations
        own = store.own_inputs(inputs)
        leaving = {address_of(inputs[i]) for i in own} if self.offloads_inputs else set()
        staying = {address_of(tensor) for tensor in inputs if store.can_leave(tensor)} - leaving
        if self.offloads_saved or leaving:
            self.parcel = Parcel(store)
        pack = self.pack_away(leaving, staying)
        if self.is_coded:
            self.encoder = Encoder(store, largest_numel(inputs))
            recorder, kept = Recorder(self.activations, self.executor.device), KeptSaves(self.encoder)
            coded = self.pack_coded(kept, {address_of(inputs[i]) for i in own}, staying)
            with recorder:
                self.graph = self.build_graph(inputs, coded)
        else:
            self.graph = self.build_graph(inputs, pack)
        outputs = self.graph.take_outputs()
        if self.is_coded:
            kept.seal(AttentionCore(outputs, recorder.calls, self.graph.leaves), pack)
        for i in own if leaving or self.boundary_bits < 16 else ():
            # The leaf is the end of an edge, nothing more: its values are in the parcel, or in nobody's need.
            self.graph.leaves[i].data = self.graph.leaves[i].data.new_empty(0)
        return outputs

    def pack_away(self, leaving: set[int], staying: set[int]) -> Callable:
        """Pack hook that sends off what the plan rests off the device.

        It must not know this object: the graph that keeps it is held here, and Python couldn't free the circle.
        """
        unit, parcel, offloads_saved, boundary, saved = (
            self.unit,
            self.parcel,
            self.offloads_saved,
            self.boundary,
            self.saved,
        )
        if parcel is None:
            return unit.pack
        can_leave = self.executor.activations.can_leave
        staying = staying | self.held_anyway()

        def pack(tensor: torch.Tensor):
            if can_leave(tensor):
                address = address_of(tensor)
                if address in leaving:
                    return parcel.pack(tensor, boundary)
                if offloads_saved and address not in staying:
                    return parcel.pack(tensor, saved)
            return unit.pack(tensor)

        return pack

    def pack_coded(self, kept: KeptSaves, own: set[int], staying: set[int]) -> Callable:
        """Pack hook that leaves to `kept` in which bits a tensor waits; it must not know this object either."""
        unit, saved_bits, boundary_bits = self.unit, self.saved_bits, self.boundary_bits
        send_input = self.sending(self.boundary) if self.offloads_inputs else None
        send_saved = self.sending(self.saved) if self.offloads_saved else None
        staying = (staying | self.held_anyway()) - own

        def pack(tensor: torch.Tensor):
            address = address_of(tensor)
            if address in own:
                return kept.defer(tensor, boundary_bits, send_input)
            return unit.pack(tensor) if address in staying else kept.defer(tensor, saved_bits, send_saved)

        return pack

    def sending(self, tier: Tier) -> Callable | None:
        """What packs a tensor for a tier; None without a parcel."""
        return functools.partial(self.parcel.pack, tier=tier) if self.parcel is not None else None

    def held_anyway(self) -> set[int]:
        """Addresses of weights and buffers."""
        weights = (*self.unit.layout.tensors, *(t for part in self.executor.stem for t in part.layout.tensors))
        addresses = {address_of(tensor.parameter) for tensor in weights}
        return addresses | {address_of(buffer) for buffer in self.unit.module.buffers()}

    def forward_dropping(self, inputs) -> list[torch.Tensor]:
        # With grad, but saving nothing: without grad torch may pick other kernels (fused attention with a
        # learned bias), and the recompute would not repeat the same bits.
        if self.saves_nothing:
            self.recording = NOTHING
            with torch.enable_grad(), saved_tensors_hooks(drop, refuse_dropped):
                args, kwargs = self.rebuild_inputs(detached_leaves(inputs))
                return self.call_unit(args, kwargs)
        recorder = Recorder(self.activations, self.executor.device)
        store = self.executor.activations
        if self.saved_bits < 16:
            self.encoder = self.encoder or Encoder(store, largest_numel(inputs))
        with torch.enable_grad(), saved_tensors_hooks(recorder.drop, refuse_dropped):
            leaves = detached_leaves(inputs)
            args, kwargs = self.rebuild_inputs(leaves)
            with recorder, self.encoding_on_the_way(inputs):
                outputs = self.call_unit(args, kwargs)
        self.recording = recorder.finish(outputs, self.unit.module)
        if self.offloads_saved:
            self.parcel = self.parcel or Parcel(store)
        if self.saved_bits < 16:
            core = AttentionCore(outputs, self.recording.calls, leaves)
        send = self.sending(self.saved) if self.offloads_saved else None

        def change(tensor, call):
            if self.saved_bits < 16:
                reason = ATTENTION if core.holds_output(call) else None if core.is_product(call) else UNSEEN
                codes = self.encoder.encode(tensor, self.saved_bits, send, exact_because=reason)
                if codes is not None:
                    return codes
            return send(tensor) if send is not None and store.can_leave(tensor) else tensor

        if self.saved_bits < 16 or self.offloads_saved:
            self.recording.exchange(change)
        return outputs

    def encoding_on_the_way(self, inputs) -> contextlib.AbstractContextManager:
        """Within: fused operators make the codes of what they read, for the encoder to take."""
        if self.encoder is None:
            return contextlib.nullcontext()
        saves_products = self.saved_bits < 16 and self.activations in MAY_BE_CODED
        self.encoder.fused = FusedSaves(
            FORMATS[self.saved_bits] if saves_products else None,
            input_format=FORMATS[self.boundary_bits] if self.late else None,
            inputs=tuple(inputs[i] for i in self.late),
            least_numel=self.encoder.small,
        )
        return self.encoder.fused.running()

    def encode_late_inputs(self, inputs) -> None:
        """Those that rest on the device in codes: a norm in the unit may have made them."""
        for i, version in self.late.items():
            if inputs[i]._version != version:
                raise RuntimeError(
                    f"{self.unit.name}: its input of shape {tuple(inputs[i].shape)} was changed in place while it ran, "
                    "and was to be saved in codes; replace the in-place operation by an ordinary one"
                )
            self.sent[i] = self.encoder.encode(inputs[i], self.boundary_bits)

    def put_away_inputs(self, inputs) -> None:
        """Starts the inputs' way off the device while the unit computes, or lets go of them."""
        self.sent: list[Handle | Codes | DroppedInputs | None] = [None] * len(inputs)
        if self.boundary is None:
            self.dropped = drop_inputs(self, inputs)
            for i in self.dropped.outputs if self.dropped is not None else ():
                self.sent[i] = self.dropped
        changes = self.offloads_inputs or self.boundary_bits < 16
        own = self.executor.activations.own_inputs(inputs) if changes else ()
        if own and self.offloads_inputs:
            self.parcel = Parcel(self.executor.activations)
        send = self.sending(self.boundary) if self.parcel is not None else None
        if self.boundary_bits < 16:
            self.encoder = Encoder(self.executor.activations, largest_numel(inputs))
            for i in own:
                if send is None:
                    self.late[i] = inputs[i]._version
                else:
                    self.sent[i] = self.encoder.encode(inputs[i], self.boundary_bits, send)
        for i in own if send is not None else ():
            self.sent[i] = self.sent[i] or send(inputs[i])
        if self.parcel is not None:
            self.parcel.send()

    def stayed_inputs(self, inputs) -> list[torch.Tensor]:
        """What autograd is to save."""
        return [tensor for tensor, handle in zip(inputs, self.sent, strict=True) if handle is None]

    def bring_back_inputs(self, stayed) -> list[torch.Tensor]:
        """All inputs; what was dropped must have been found again."""
        stayed = iter(stayed)
        restore = unpack_with(self.unit, self.parcel)
        inputs = []
        for i, handle in enumerate(self.sent):
            if isinstance(handle, DroppedInputs):
                inputs.append(handle.take(i))
            else:
                inputs.append(next(stayed) if handle is None else restore(handle).requires_grad_())
        return inputs

    def call_unit(self, args, kwargs) -> list[torch.Tensor]:
        with self.executor.side_outputs.collecting(self.side_keys) as captured:
            result = self.unit.original_forward(*args, **kwargs)
        outputs, self.rebuild_outputs = flatten_tensors((result, captured))
        return outputs

    def build_graph(self, inputs, pack: Callable, *, run=None) -> LocalGraph:
        """Runs the unit, within `run`, with grad on leaves of its own. The unit must be leased."""
        leaves = detached_leaves(inputs)
        # Without a hook autograd itself sees to it that nothing saved is changed in place.
        plain = pack == self.unit.pack and self.unit.slot is None
        hooks = contextlib.nullcontext() if plain else saved_tensors_hooks(pack, unpack_with(self.unit, self.parcel))
        with torch.enable_grad(), hooks, run or contextlib.nullcontext():
            args, kwargs = self.rebuild_inputs(leaves)
            outputs = self.call_unit(args, kwargs)
        if not self.unit.audited:
            audit(self.executor, self.unit, leaves, outputs)
        return LocalGraph(leaves, outputs, self.unit, lasts=self.keep)

    def backward(self, stayed, num_inputs: int, output_gradients) -> list[torch.Tensor | None]:
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        if self.graph is None and self.recording is None:
            raise RuntimeError(
                f"{self.unit.name}: backward ran a second time through a graph that was freed; "
                "pass retain_graph=True to the first backward"
            )
        if self.parcel is not None:
            self.parcel.bring_back()
        if self.dropped is not None:
            find_again(self)
        with self.executor.lease(self.unit, backward=True):
            inputs = [] if self.keep else self.bring_back_inputs(stayed)
            if self.executor.on_backward is not None and not self.keep:
                # Before the recompute: whatever it runs takes memory that is free until then.
                self.executor.on_backward(self, inputs, output_gradients)
            graph = self.graph if self.keep else self.recompute(inputs, retain)
            gradients = graph.gradients(output_gradients, retain=retain and self.keep)
            num_leaves = len(graph.differentiable_leaves)
            by_leaf = dict(zip(graph.differentiable_leaves, gradients[:num_leaves], strict=True))
            parameter_gradients = [
                (target, gradient)
                for target, gradient in zip(graph.targets, gradients[num_leaves:], strict=True)
                if gradient is not None
            ]
            if self.dropped is not None:
                self.dropped.found = {}
            if not retain:
                self.graph = self.recording = self.dropped = None
                self.sent = []
            if self.parcel is not None:
                self.parcel.put_away() if retain else self.parcel.release()
            self.executor.deliver(self.unit, parameter_gradients)
        return [by_leaf.get(position) for position in range(num_inputs)]

    def recompute(self, inputs, retain: bool) -> LocalGraph:
        if self.saves_nothing:
            return self.recompute_all(inputs)
        saves, parcel = FusedSaves(), self.parcel

        def restore(saved: Handle | Codes) -> torch.Tensor:
            return saved.give(parcel, saves) if isinstance(saved, Codes) else parcel.unpack(saved)

        replay = Replay(self.recording, self.unit.name, restore, keep=retain, saves=saves)

        def pack(tensor: torch.Tensor):
            replay.count_pack()
            return self.unit.pack(tensor)

        with self.before.restored(), replay, saves.running():
            return self.build_graph(inputs, pack)

    def recompute_all(self, inputs) -> LocalGraph:
        run = self.unit.tail.run_again(self.unit.module)
        graph = None
        with contextlib.suppress(WrongWayError), self.before.restored():
            graph = self.build_graph(inputs, run.packing(self.unit.pack), run=run)
        if not run.ended_well(graph.outputs if graph is not None else []):
            graph = None  # never two of them in memory
            with self.before.restored():
                graph = self.build_graph(inputs, self.unit.pack)
        return graph


class _UnitNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call: UnitCall, graph_root: torch.Tensor, *inputs: torch.Tensor):
        if not call.keep:
            call.put_away_inputs(inputs)
        outputs = call.forward(inputs)
        saved = () if call.keep else call.stayed_inputs(inputs)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.num_inputs = len(inputs)
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, call.differentiable, strict=True) if not d))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *output_gradients):
        call = ctx.call
        stayed, call.stayed = ctx.saved_tensors if call.stayed is None else call.stayed, None
        return (None, None, *call.backward(stayed, ctx.num_inputs, output_gradients))
