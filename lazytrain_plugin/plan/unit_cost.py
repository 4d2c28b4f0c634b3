"""`UnitCost`: what one unit costs in a step, per choice, in bytes and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lazytrain_plugin.plan.formats import CodingRates, coded_bytes
from lazytrain_plugin.profile.model import UnitRole
from lazytrain_plugin.units import MIB
from lazytrain_plugin.vocab import Activations

STEM_STAGING_BYTES = 256 * MIB
"""A unit's states pass the GPU in chunks of at most this."""
KERNEL_WAIT_FRAC = 0.1
"""Of a unit's forward: what an update that begins while the GPU computes waits for the running matmul to end, on
average. Matmuls fill the GPU until they end, whatever the priority of a stream. Measured on an H200 (7B, 32 x 1024
tokens): 2.4 ms of 23 ms, 6 ms at most."""
NVME_PIECE_BYTES = 256 * MIB
"""States on NVMe come to memory in pieces of about this, ..."""
NVME_MOST_PIECES = 8
"""... in so many of a unit at most, on all ranks of the node together: each is a file."""
SMALL_SEND_BYTES = MIB
"""Gradients of the stem below this go home beside the others: see `UnitCost.has_gradient_place`."""


def nvme_pieces(num_bytes: int, ranks: int) -> int:
    """In how many pieces a rank's states of a unit, so many bytes, pass between the disk and memory."""
    return max(1, min(NVME_MOST_PIECES // ranks, -(-num_bytes // NVME_PIECE_BYTES)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCost:
    """One way of saving activations between nothing and everything."""

    saved_bytes: int
    """As it is, in 16 bits (fp32 in 32)."""
    recompute_frac: float
    """Share of the forward that runs again in backward."""
    attention_bytes: int = 0
    """Of `saved_bytes`: never in fewer bits."""
    element_bytes: int = 2
    bits: int = 16
    """What the planner plans with, for the unit's input too: the fewest that the fidelity allows."""
    fused_bytes: int = 0
    """Of `saved_bytes`: a fused operator makes and reads their codes."""
    coding: CodingRates = CodingRates()

    def bytes_in(self, bits: int) -> int:
        """What is saved when all but attention is in so many bits."""
        return self.attention_bytes + coded_bytes(self.saved_bytes - self.attention_bytes, self.element_bytes, bits)

    def coding_s(self, bits: int) -> float:
        """What making and reading the codes of what is saved takes."""
        alone_bytes = self.saved_bytes - self.attention_bytes - self.fused_bytes
        return self.coding.pass_s(alone_bytes, self.element_bytes, bits) + self.coding.fused_s(
            self.fused_bytes, self.element_bytes, bits
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """Bytes and seconds of one unit at the planned micro-batch."""

    name: str
    role: UnitRole
    num_trainable: int
    weight_bytes: int
    gradient_bytes: int
    remainder_bytes: int
    moment_bytes: int
    state_bits: int = 32
    """Of a moment of its larger tensors."""
    accumulator_bytes: int
    """Sums over micro-batches; 0 without accumulation."""
    gradient_code_bytes: int = 0
    """The gradients in 8-bit codes, as they rest and leave the GPU; 0: they do so as they are."""
    boundary_bytes: int = 0
    fused_input: bool = False
    """A fused norm makes the codes of the input where that stays on the device."""
    kept_bytes: int = 0
    workspace_bytes: int = 0
    """Recompute and its backward at their fullest, beyond the input."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    """Without the recompute, which costs `forward_s`."""
    forward_launch_s: float = 0.0
    """Host time to launch its forward; 0: not counted. See plan/launches.py."""
    backward_launch_s: float = 0.0
    """Without what runs again."""
    update_launch_s: float = 0.0
    """Of an update by the GPU, for each chunk of its states."""
    weight_h2d_s: float = 0.0
    gradient_d2h_s: float = 0.0
    cpu_update_s: float = 0.0
    gpu_update_s: float = 0.0
    staged_bytes: int = 0
    """What passes the GPU for a streamed update, with the room that a slot has for it."""
    state_slot_bytes: int = 0
    """Staging buffer on the GPU through which the unit's states pass, chunk by chunk."""
    state_chunks: int = 1
    """Parts in which the states pass."""
    accumulate_s: float = 0.0
    """Host time to add one micro-batch's gradients; 0 without accumulation."""
    exchange_s: float = 0.0
    """What one micro-batch's gradients take to meet those of the other ranks, inside the node and between nodes."""
    network_s: float = 0.0
    """Between nodes alone."""
    gather_s: float = 0.0
    """What every rank's part of updated weights takes to come to the GPUs of all ranks that have one."""
    spread_s: float = 0.0
    """What updated weights in host memory take to come to the other nodes."""
    ranks: int = 1
    """Ranks of the machine among which the unit's update is divided."""
    nodes: int = 1
    """Machines among which it is divided too. Bytes of states, gradients at rest and sums are those of one of them."""
    strategies: Mapping[Activations, StrategyCost] = field(default_factory=dict)
    """Other than KEEP. RECOMPUTE is there where less than the whole forward runs again."""

    @property
    def state_bytes(self) -> int:
        """Remainder, moments, gradients and accumulators: what rests at the updater's side beside the weights."""
        return self.rest_state_bytes + self.gradient_rest_bytes + self.accumulator_bytes

    @property
    def has_gradient_place(self) -> bool:
        """Its gradients are one of those for whose way home there are slots. The final norm's are none: for them the
        compute stream would wait until the head's, which come just before, are home."""
        return self.role != UnitRole.REST or self.gradient_bytes >= SMALL_SEND_BYTES

    @property
    def gradient_rest_bytes(self) -> int:
        """Gradients at rest, and on their way there. While autograd makes them they take `gradient_bytes`."""
        return self.gradient_code_bytes or -(-self.gradient_bytes // self.nodes)

    @property
    def parts(self) -> int:
        """Ranks among which the unit's update is divided, over all machines."""
        return self.ranks * self.nodes

    @property
    def rest_state_bytes(self) -> int:
        """Remainder and moments: what an update reads and writes beside the weights."""
        return self.remainder_bytes + self.moment_bytes

    @property
    def nvme_pieces(self) -> int:
        """In how many pieces a rank's part of them passes between NVMe and memory."""
        return nvme_pieces(self.rest_state_bytes // self.ranks, self.ranks)

    @property
    def nvme_piece_bytes(self) -> int:
        """The largest of those pieces."""
        return -(-self.rest_state_bytes // (self.ranks * self.nvme_pieces))

    @property
    def resident_state_bytes(self) -> int:
        """Remainder, moments and accumulators on the GPU: a rank has those of its part."""
        return -(-self.rest_state_bytes // self.ranks) + -(-self.accumulator_bytes // self.ranks)

    @property
    def resident_gradient_bytes(self) -> int:
        """Gradients that stay on the GPU for such an update: of several ranks each keeps its part of the mean."""
        return -(-self.gradient_bytes // self.parts)

    @property
    def streamed_in_bytes(self) -> int:
        """What crosses to the GPU for a streamed update, beside the weights: states and the gradient (or its sum).

        With several ranks it is each one's part, and that of the weights goes along.
        """
        states = self.rest_state_bytes + (self.accumulator_bytes or self.gradient_rest_bytes)
        return states if self.parts == 1 else (states + self.weight_bytes // self.nodes) // self.ranks

    @property
    def streamed_out_bytes(self) -> int:
        """What comes back from a streamed update beside the weights, which return where they rest on the host."""
        return self.rest_state_bytes // self.ranks

    @property
    def returned_weight_bytes(self) -> int:
        """New weights that come back from a streamed update, where they rest on the host or have a copy there."""
        return self.weight_bytes // self.parts

    @property
    def kernel_wait_s(self) -> float:
        """What the update of one chunk waits for kernels of a unit like this that runs forward then."""
        return KERNEL_WAIT_FRAC * self.forward_s

    @property
    def own_update_s(self) -> float:
        """The GPU's time for an update, of several ranks for its part."""
        return self.gpu_update_s / self.parts

    def planned_bits(self, activations: Activations) -> int:
        """In how many bits the planner takes what a strategy saves."""
        return self.strategies[activations].bits if activations in self.strategies else 16

    def planned_boundary_bits(self, activations: Activations) -> int:
        """The same of the input of a unit that saves so; 16 where attention is computed again from it."""
        return self.planned_bits(activations) if activations == Activations.MATMULS else 16

    def planned_formats(self, activations: Activations) -> dict[str, int]:
        """Both, as the fields of a plan."""
        return {
            "saved_bits": self.planned_bits(activations),
            "boundary_bits": self.planned_boundary_bits(activations),
        }

    def saved_bytes(self, activations: Activations, bits: int | None = None) -> int:
        """What a strategy saves beside the input; `bits` None: in those that the planner plans with."""
        if activations == Activations.RECOMPUTE:
            return 0
        if activations == Activations.KEEP:
            return self.kept_bytes
        return self.strategies[activations].bytes_in(self.planned_bits(activations) if bits is None else bits)

    def spared_input_bytes(self, activations: Activations) -> int:
        """By how much the input is smaller in the bits that the planner plans with for a strategy."""
        return self.boundary_bytes - self.boundary_bytes_in(self.planned_boundary_bits(activations))

    @property
    def most_spared_input_bytes(self) -> int:
        """The same for the strategy whose codes the fidelity allows; 0 without one."""
        return max(map(self.spared_input_bytes, self.strategies), default=0)

    def boundary_bytes_in(self, bits: int) -> int:
        """The unit's input in so many bits."""
        strategy = self.strategies.get(Activations.MATMULS)
        return coded_bytes(self.boundary_bytes, strategy.element_bytes if strategy else 2, bits)

    def recompute_s(self, activations: Activations) -> float:
        """What a strategy computes again in backward, and coding in the bits that the planner plans with."""
        return self.again_s(activations, self.planned_bits(activations), self.planned_boundary_bits(activations))

    def again_s(
        self, activations: Activations, saved_bits: int, boundary_bits: int, *, input_leaves: bool = False
    ) -> float:
        """The same with what is saved and the input in so many bits.

        Args:
            input_leaves: the input leaves the device, for which a pass of its own makes its codes first.
        """
        if activations == Activations.RECOMPUTE and activations not in self.strategies:
            return self.forward_s
        if activations == Activations.KEEP:
            return 0.0
        strategy = self.strategies[activations]
        coding_s = 0.0
        if saved_bits < 16:
            coding_s += strategy.coding_s(saved_bits)
        if boundary_bits < 16:
            rates = strategy.coding
            make = rates.fused_input_s if self.fused_input and not input_leaves else rates.pass_s
            coding_s += make(self.boundary_bytes, strategy.element_bytes, boundary_bits)
        return strategy.recompute_frac * self.forward_s + coding_s

    def can(self, activations: Activations) -> bool:
        """Whether the unit's profile knows the strategy, and it saves anything."""
        if activations == Activations.KEEP:
            return self.kept_bytes > 0
        return activations == Activations.RECOMPUTE or activations in self.strategies

    def divided(self, ranks: int, nodes: int = 1) -> UnitCost:
        """The unit for one of the ranks of a machine, which each update a part of it; with several `nodes` a part of
        what is the machine's.

        Gradients meet on the GPUs, from where each rank sends its part home.
        """
        # Weights pass the GPU with their states, in the room of fp32.
        staged_bytes = (self.staged_bytes + 4 * self.num_trainable) // (ranks * nodes)
        of_node = {
            name: -(-getattr(self, name) // nodes)
            for name in ("remainder_bytes", "moment_bytes", "accumulator_bytes", "gradient_code_bytes")
        }
        return replace(
            self,
            **of_node,
            ranks=ranks,
            nodes=nodes,
            gradient_d2h_s=self.gradient_d2h_s / (ranks * nodes),
            cpu_update_s=self.cpu_update_s / nodes,
            accumulate_s=self.accumulate_s / nodes,
            staged_bytes=staged_bytes,
            state_slot_bytes=min(STEM_STAGING_BYTES, staged_bytes),
            state_chunks=max(1, -(-staged_bytes // STEM_STAGING_BYTES)),
        )
