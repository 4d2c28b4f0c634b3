"""What the decisions for one unit come to, in numbers: looked up once, for replays by the thousand (plan/replay.py)."""

from __future__ import annotations

from dataclasses import dataclass

from lazytrain_plugin.plan.accounting import (
    Staging,
    again_s,
    is_streamed,
    nvme_staging,
    nvme_updated_bytes,
    offloaded_bytes,
    sends_gradients,
    takes_gradient_slot,
    unit_bytes,
    updates_meet_at_home,
    workspace_bytes,
)
from lazytrain_plugin.plan.launches import launches_of
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost
from lazytrain_plugin.plan.result import UnitPlan
from lazytrain_plugin.vocab import Tier, Updater

FROZEN, ON_WORKER, ON_GPU, PASSING = range(4)
"""Who updates a unit: nobody, the CPU, the GPU where its states rest, the GPU with states that pass it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the decisions for one unit come to. Seconds as the simulator takes them, bytes as the accounting does."""

    unit: UnitPlan
    """Kept so that its identity stays its own."""
    is_known: bool
    """No activations or gradients on NVMe, no streamed update that ranks divide; else the long ways are asked."""
    updates: int
    streamed: bool
    sends: bool
    has_place: bool
    leaves: bool
    update_s: float
    """On the worker, slowed down by what leaves."""
    delay_s: float
    weights_s: float
    forward_s: float
    leave_s: float
    return_s: float
    backward_s: float
    """With the recompute."""
    forward_launch_s: float
    backward_launch_s: float
    update_launch_s: float
    """Host time for an update by the GPU."""
    meets_s: float
    """Of its gradients with those of other ranks."""
    gather_s: float
    spread_s: float
    """Of new weights to other nodes, where they are updated in host memory."""
    send_s: float
    add_s: float
    gpu_update_s: float
    chunks: int
    in_s: float
    out_s: float
    passing_update_s: float
    chunk_update_s: float
    kernel_wait_s: float
    rest_gpu: int
    rest_cpu: int
    weight_bytes: int
    offloaded: int
    input_bytes: int
    saved_bytes: int
    gradient_bytes: int
    takes_slot: bool
    resting_gradient_bytes: int
    workspace_bytes: int
    state_slot_bytes: int
    rest_nvme: int
    staging: tuple[Staging, ...]
    """Buffers of a rank for what rests there."""
    stage_s: float
    """Reading what an update needs from NVMe, and what writing loses by that; 0: nothing rests there."""
    stage_lost_s: float
    write_s: float
    write_lost_s: float
    fetch_s: float
    """Reading weights for a computation; 0: they rest elsewhere."""
    fetch_lost_s: float


def facts_of(problem: PlacementProblem, cost: UnitCost, unit: UnitPlan) -> Facts:
    activations = {unit.boundary, unit.saved} <= {Tier.GPU, Tier.CPU}
    streamed, sends, offloaded = is_streamed(unit), sends_gradients(cost, unit), offloaded_bytes(cost, unit)
    rest = unit_bytes(cost, unit)
    updates = ON_WORKER
    if not cost.num_trainable:
        updates = FROZEN
    elif unit.streams_states:
        updates = PASSING
    elif unit.updater == Updater.GPU:
        updates = ON_GPU
    delay_s = problem.update_delay_s(offloaded)
    leaving_bytes = cost.streamed_out_bytes + (cost.weight_bytes if streamed else 0)
    on_gpu = unit.boundary == Tier.GPU
    staged, fetched = nvme_updated_bytes(cost, unit), cost.weight_bytes if unit.weights == Tier.NVME else 0
    launches = launches_of(cost, unit)
    return Facts(
        unit=unit,
        is_known=activations and not updates_meet_at_home(cost, unit) and unit.gradients != Tier.NVME,
        updates=updates,
        streamed=streamed,
        sends=sends,
        has_place=cost.has_gradient_place,
        leaves=offloaded > 0,
        update_s=cost.cpu_update_s + delay_s,
        delay_s=delay_s,
        weights_s=cost.weight_h2d_s,
        forward_s=cost.forward_s,
        leave_s=problem.d2h_s(offloaded),
        return_s=problem.h2d_s(offloaded),
        backward_s=again_s(cost, unit) + cost.backward_s,
        forward_launch_s=launches.forward_s,
        backward_launch_s=launches.backward_s,
        update_launch_s=launches.update_s,
        meets_s=cost.exchange_s,
        gather_s=cost.gather_s,
        spread_s=cost.spread_s if sends else 0.0,
        send_s=cost.gradient_d2h_s,
        add_s=cost.accumulate_s,
        gpu_update_s=cost.own_update_s,
        chunks=cost.state_chunks,
        in_s=problem.h2d_s(cost.streamed_in_bytes) / cost.state_chunks,
        out_s=problem.d2h_s(leaving_bytes) / cost.state_chunks,
        passing_update_s=cost.own_update_s,
        chunk_update_s=cost.own_update_s / cost.state_chunks,
        kernel_wait_s=cost.kernel_wait_s,
        rest_gpu=rest["gpu"],
        rest_cpu=rest["cpu"],
        weight_bytes=cost.weight_bytes if streamed else 0,
        offloaded=offloaded,
        input_bytes=cost.boundary_bytes_in(unit.boundary_bits) if on_gpu else 0,
        saved_bytes=cost.saved_bytes(unit.activations, unit.saved_bits) if unit.saved == Tier.GPU else 0,
        gradient_bytes=cost.gradient_bytes,
        takes_slot=takes_gradient_slot(cost, unit),
        resting_gradient_bytes=0 if sends else cost.resident_gradient_bytes,
        workspace_bytes=workspace_bytes(cost, unit),
        state_slot_bytes=cost.state_slot_bytes if unit.streams_states else 0,
        rest_nvme=rest["nvme"],
        staging=tuple(nvme_staging(cost, unit)),
        stage_s=problem.nvme_read_s(staged),
        stage_lost_s=problem.nvme_write_delay_s(staged),
        write_s=problem.nvme_write_s(staged),
        write_lost_s=problem.nvme_read_delay_s(staged),
        fetch_s=problem.nvme_read_s(fetched, each=True),
        fetch_lost_s=problem.nvme_write_delay_s(fetched, each=True),
    )
