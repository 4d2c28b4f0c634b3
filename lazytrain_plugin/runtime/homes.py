"""`UnitHome`: the memory of one unit at its planned tiers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from lazytrain_plugin.kernels.split import join_master, split_master
from lazytrain_plugin.plan.result import UnitPlan
from lazytrain_plugin.runtime.gradient_format import Gradient, GradientFormat, part_of, take_over
from lazytrain_plugin.runtime.home_states import HomeStates
from lazytrain_plugin.runtime.host_memory import HostBuffer
from lazytrain_plugin.runtime.layout import FlatLayout, UnitTensor, elements
from lazytrain_plugin.runtime.nvme.gradients import NvmeGradients
from lazytrain_plugin.runtime.nvme.stores import NvmeStores
from lazytrain_plugin.runtime.nvme.weights import NvmeWeights
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.runtime.state_layout import ACCUMULATOR, state_flats
from lazytrain_plugin.vocab import Tier, Updater


class UnitHome(HomeStates):
    """Weights, remainders, moments and gradients of one unit.

    Weights rest on the GPU (`gpu_weights`) or in host memory (`host_weights`); a GPU-resident unit with a CPU
    updater has both, the host copy being what the update kernel works on (with several `ranks` also where states pass
    the GPU: each updates a part, and they meet at home). States and gradients are on the
    updater's side, or in host memory from where they pass the GPU for their update. Moments exist only for `native`
    updates; the generic path keeps its own states. States on NVMe are in memory within `states_in_memory` only;
    gradients there within `gradients_in_memory`, and sums over micro-batches within `sums_in_memory`.

    With several `ranks`, what is in host memory is there once for all ranks of a node, each of which updates its own
    elements of it (`span`). Of states on NVMe and on the GPU each has those elements on its own, and of all states and
    gradients where they are divided over the job. Weights on the GPU every rank has whole.
    """

    def __init__(
        self,
        layout: FlatLayout,
        plan: UnitPlan,
        device: torch.device,
        *,
        native: bool,
        nvme: NvmeStores | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        super().__init__(layout, plan, ranks, native=native)
        self.device = device
        self.on_gpu = plan.weights == Tier.GPU
        self.updates_on_gpu = plan.updater == Updater.GPU
        pin = device.type == "cuda"
        trained = layout.state_numel > 0
        updated_at_home = not self.updates_on_gpu or (ranks is not None and plan.streams_states)
        needs_host_weights = not self.on_gpu or (trained and updated_at_home)
        self.nvme_weights: NvmeWeights | None = None
        if plan.weights == Tier.NVME:
            self.nvme_weights = nvme.weights(layout, plan)
        self.host_buffer = self.nvme_weights
        if needs_host_weights and self.host_buffer is None:
            self.host_buffer = HostBuffer(layout.weight_bytes, pin=pin, ranks=ranks)
        self.host_weights = self.host_buffer.tensor(torch.uint8, 0, layout.weight_bytes) if needs_host_weights else None
        # A storage per tensor: nothing is streamed as one here, and `torch.save` writes whole storages.
        self.gpu_weights = {
            tensor: torch.empty(tensor.numel, dtype=tensor.dtype, device=device)
            for tensor in (layout.tensors if self.on_gpu else ())
        }
        self._shows_own = False
        self.state_buffers: dict[str, HostBuffer] = {}
        """States in host memory by the key of their flat; sums over micro-batches are `ACCUMULATOR`."""
        divided = ranks is not None and (plan.gradient_tier == Tier.NVME or self.is_read_together)
        part = ranks.part(layout) if divided else layout.part(0, 1)
        self.gradient_format = GradientFormat(layout, plan.gradient_bits, part)
        self.gradient_buffer: HostBuffer | None = None
        self._host_gradients: torch.Tensor | None = None
        self._gpu_gradients: dict[UnitTensor, Gradient] = {}
        self.accumulator: torch.Tensor | None = None
        self.nvme_gradients: NvmeGradients | None = None
        if trained:
            self._allocate_states(pin, nvme)
        self.views = {tensor: tensor.shaped(self._resting_place(tensor)) for tensor in layout.tensors}
        """What `parameter.data` is while the unit does not run."""

    def _resting_place(self, tensor: UnitTensor) -> torch.Tensor:
        """What a parameter shows, 1-D [numel] in storage order."""
        if self.on_gpu:
            return self.gpu_weights[tensor]
        return self.host_buffer.shown(tensor.dtype, tensor.weight_offset_bytes, tensor.numel)

    @property
    def shows_shared(self) -> bool:
        """Parameters at rest show host memory that ranks have in common."""
        return self.ranks is not None and not self.on_gpu

    def _allocate_states(self, pin: bool, nvme: NvmeStores | None) -> None:
        if self.plan.gradient_tier == Tier.NVME:
            self.nvme_gradients = nvme.gradients(self.gradient_format, name=self.plan.name)
        elif not self.states_on_gpu:
            nbytes = self.gradient_format.arrival_bytes
            self.gradient_buffer = HostBuffer(nbytes, pin=pin, ranks=self.ranks if self.is_shared else None)
            self._host_gradients = self.gradient_buffer.tensor(torch.uint8, 0, nbytes)
        if self.plan.states == Tier.NVME:
            self.nvme_states = nvme.states(self.layout, self.plan)
        else:
            part = self.ranks.part(self.layout) if self.is_divided else None
            flats = self.state_flats = tuple(state_flats(self.layout, self.plan, native=self.native, part=part))
            held = {key: self._state(key, dtype, numel) for key, dtype, numel in flats}
            self.held = self._holding(held, 0 if part is None else part[0])
        if self.is_shared and self.nvme_gradients is None:
            # Made while all ranks are here; takes no memory before it is used.
            self._make_accumulator()

    def _make_accumulator(self) -> None:
        self.accumulator = self._state(ACCUMULATOR, self.gradient_format.sum_dtype, self.gradient_format.sum_numel)

    @contextmanager
    def gradients_in_memory(self) -> Iterator[None]:
        """Within: `gradient` works, wherever they rest; those under way must have arrived. Raises StorageError."""
        if self.nvme_gradients is None:
            yield
            return
        with self.nvme_gradients.in_memory() as self._host_gradients:
            try:
                yield
            finally:
                self._host_gradients = None

    @contextmanager
    def sums_in_memory(self, *, changes: bool) -> Iterator[None]:
        """Within: `accumulated` works, wherever the sums rest. Raises StorageError."""
        if self.nvme_gradients is None:
            yield
            return
        with self.nvme_gradients.sums.in_memory(changes=changes):
            self.accumulator = self.nvme_gradients.sums.tensors[ACCUMULATOR]
            try:
                yield
            finally:
                self.accumulator = None

    def _state(self, key: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        if self.states_on_gpu:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        # Only states that travel are page-locked.
        pin = self.plan.streams_states and self.device.type == "cuda"
        ranks = self.ranks if self.is_shared else None
        buffer = self.state_buffers[key] = HostBuffer(numel * dtype.itemsize, pin=pin, ranks=ranks)
        return buffer.tensor(dtype, 0, numel)

    def fits(self, plan: UnitPlan) -> bool:
        """Whether `plan` asks for this very home (what is kept between forward and backward is not part of it)."""
        kept = ("activations", "boundary", "saved", "saved_bits", "boundary_bits", "reason")
        same = {name: getattr(plan, name) for name in kept}
        return replace(self.plan, **same) == plan

    # What the update works on.

    def weight(self, tensor: UnitTensor) -> torch.Tensor:
        """The updater's copy of a weight, 1-D [numel] in storage order."""
        if self.host_weights is not None:
            return tensor.weight_view(self.host_weights)
        return self.gpu_weights[tensor]

    def gradient(self, tensor: UnitTensor) -> Gradient:
        """The gradient as it arrived, 1-D [numel] in storage order, in the weight's dtype or in codes; of gradients on
        NVMe or on the GPU, of several ranks, the part that is here."""
        if self.states_on_gpu:
            return self._gpu_gradients[tensor]
        return self.gradient_format.arrival(tensor, self._host_gradients)

    def span_in_gradient(self, tensor: UnitTensor, span: slice) -> slice:
        """Where elements of the tensor are in its `gradient`, and in what is `accumulated`."""
        first = tensor.span_in(self.gradient_format.part).start
        return slice(span.start - first, span.stop - first)

    def keep_gradient(self, tensor: UnitTensor, raw: torch.Tensor | None) -> None:
        """States on the GPU: holds the tensor that autograd made, or its codes, until the update has used it (None lets
        go of it)."""
        self._gpu_gradients[tensor] = None if raw is None else self.gradient_format.at_rest(raw)

    def drop_gradients(self) -> None:
        """The gradients that rested on the GPU or on NVMe have been used (or are not going to be)."""
        self._gpu_gradients.clear()
        if self.nvme_gradients is not None:
            self.nvme_gradients.forget()

    def accumulated(self, tensor: UnitTensor) -> Gradient:
        """The sum over micro-batches, fp32 or in codes, otherwise as `gradient`; its memory is made at first use."""
        form = self.gradient_format
        if self.accumulator is None:
            self._make_accumulator()
        return form.sum(tensor, self.accumulator)

    # Masters and moments as fp32, for checkpoints and moves. Storage order, 1-D [numel], on the CPU.

    def read_master(self, tensor: UnitTensor, within: slice | None = None) -> torch.Tensor:
        """`within`: of these elements, from a multiple of 256 on."""
        return self.master_on_device(tensor, within).cpu()

    def master_on_device(self, tensor: UnitTensor, within: slice | None = None) -> torch.Tensor:
        """The fp32 master where the weight is (the weight itself where that is fp32); of parts, on the CPU."""
        within = within or tensor.whole
        weight = elements(self.weight(tensor), within)
        if not tensor.is_split:
            return weight.float()
        if self.is_divided:
            weight = weight.cpu()  # where others' parts come to
        master = torch.empty(weight.numel(), dtype=torch.float32, device=weight.device)
        for span in self._each_part(tensor, within):
            remainder = self.remainder_of(tensor, span).to(weight.device)
            place = slice(span.start - within.start, span.stop - within.start)
            join_master(elements(weight, place), remainder, elements(master, place))
        return master

    def write_master(self, tensor: UnitTensor, values: torch.Tensor) -> None:
        """Sets master and weight (both copies of it). `values`: fp32 or the weight's dtype, [numel]; with several
        ranks each gives the same."""
        weight = self.weight(tensor)
        if not tensor.is_split:
            weight.copy_(values)
        else:
            remainder = None
            if values.dtype == torch.bfloat16:
                weight.copy_(values)  # the master of a bf16 value is that value
            else:
                device = self.device if self.states_on_gpu else torch.device("cpu")
                split = weight if weight.device == device else torch.empty_like(weight, device="cpu")
                in_parts = self.is_divided or self.nvme_states
                remainder = torch.empty_like(split, dtype=torch.int16) if in_parts else self.remainder_of(tensor)
                split_master(values.to(split.device, torch.float32), split, remainder)
                if split is not weight:
                    weight.copy_(split)
            for index, span in self._own_pieces(tensor):
                with self.states_in_memory(index, changes=True):
                    own = self.remainder_of(tensor, span)
                    if remainder is None:
                        own.zero_()
                    elif own is not remainder:
                        own.copy_(elements(remainder, span))
        self.publish(tensor)

    def publish(self, tensor: UnitTensor) -> None:
        """Brings the GPU-resident weight up to date with the host copy that was just written."""
        if self.has_two_copies:
            self.gpu_weights[tensor].copy_(tensor.weight_view(self.host_weights), non_blocking=True)

    @property
    def has_two_copies(self) -> bool:
        """GPU-resident weights whose updates run on a copy in host memory."""
        return self.on_gpu and self.host_weights is not None

    @property
    def shares_weights(self) -> bool:
        """Ranks have weights in common, whatever each of them shows."""
        return self.ranks is not None and self.host_weights is not None

    @property
    def shows_own_weights(self) -> bool:
        """This rank is known to show other weights than those that ranks have in common."""
        return self._shows_own if self.on_gpu else self.host_buffer.has_writes

    def digest_of_own_weights(self) -> int:
        """Of all that this rank shows, if it is known to differ from what ranks have in common; else 0."""
        if not self.shows_own_weights or self.ranks.num_nodes == 1:  # then nobody has others' digests to compare
            return int(self.shows_own_weights)
        crc = 0
        for tensor in self.layout.tensors:
            crc = zlib.crc32(self._resting_place(tensor).cpu().view(torch.uint8).numpy(), crc)
        return 1 + crc

    def look_for_own_weights(self) -> None:
        """After changes to GPU-resident weights from outside. Nobody may write to the host copy meanwhile."""
        self._shows_own = any(
            not torch.equal(shown.view(torch.uint8).cpu(), tensor.weight_view(self.host_weights).view(torch.uint8))
            for tensor, shown in self.gpu_weights.items()
        )

    def take_shown_weights(self) -> None:
        """Weights that were changed from outside where they are shown: the host copy, which ranks may have in common,
        takes their values.

        Remainders stay, as they do where there is one copy: untouched elements keep their masters to the bit.
        """
        for tensor in self.layout.tensors:
            tensor.weight_view(self.host_weights).copy_(self._resting_place(tensor))

    def show_shared_weights(self) -> None:
        """What this rank shows gives way to what the ranks have in common."""
        if not self.on_gpu:
            self.host_buffer.forget_writes()
            return
        self._shows_own = False
        for tensor in self.layout.tensors:
            self.publish(tensor)

    def copy_from(self, other: UnitHome) -> None:
        """Takes over everything `other` holds, bit for bit where the state format is the same. Not gradients."""
        for tensor in self.layout.tensors:
            self.weight(tensor).copy_(other.weight(tensor))
            self.publish(tensor)
        if self.layout.trained:
            self.take_states(other)

    def take_sums(self, other: UnitHome, tensors: Collection[UnitTensor]) -> None:
        """Takes over sums over micro-batches."""
        if not tensors:
            return
        divided = [home for home in (self, other) if home.has_part_of_gradients]
        with self.sums_in_memory(changes=True), other.sums_in_memory(changes=False):
            for tensor in tensors:
                span = tensor.span_in(divided[0].gradient_format.part) if divided else slice(0, tensor.numel)
                take_over(part_of(self.accumulated(tensor), span), part_of(other.accumulated(tensor), span))

    @property
    def has_part_of_gradients(self) -> bool:
        """Gradients are on NVMe, on the GPU or divided over the job, and each of several ranks has its own part."""
        return self.ranks is not None and (self.nvme_gradients is not None or self.is_read_together)

    def for_each_host_buffer(self, action: Callable[[HostBuffer], None]) -> None:
        for buffer in (self.host_buffer, self.gradient_buffer, *self.state_buffers.values()):
            if isinstance(buffer, HostBuffer):  # not a mapped file
                action(buffer)

    def release(self) -> None:
        """Gives page locks and disk space back. Views that the model still holds stay readable."""
        self.for_each_host_buffer(HostBuffer.unpin)
        for stored in (*self.nvme_states, self.nvme_gradients, self.nvme_weights):
            if stored is not None:
                stored.close()

    def let_go(self, *, updated: bool) -> None:
        """Weights on NVMe were changed (`updated`: only what this rank updates): to the disk with them, and out of
        memory, in the background."""
        if self.nvme_weights is not None:
            self.nvme_weights.let_go(updated=updated)
