"""The replay against step times worked out by hand."""

from dataclasses import replace

import pytest

from lazytrain_plugin.plan.choices import HOMES
from lazytrain_plugin.plan.greedy import leanest_plan
from lazytrain_plugin.plan.problem import UnitCost, build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.plan.simulate import Resource, simulate
from lazytrain_plugin.plan.unit_cost import SMALL_SEND_BYTES
from lazytrain_plugin.profile.model import UnitRole
from lazytrain_plugin.vocab import Activations, Tier, Updater
from tests.plan import builders

ON_GPU = {"weights": Tier.GPU, "states": Tier.GPU, "updater": Updater.GPU}


def timed(num_units=3, *, forward=2.0, h2d=0.0, d2h=0.0, update=0.0, accumulate=0.0, accumulation=1, stem=()):
    """A problem whose units take these seconds; backward without recompute takes twice the forward."""
    base = build_problem(
        builders.model(num_units), builders.hardware(), PlanRequest(max_tokens=8, accumulation_steps=accumulation)
    )
    units = tuple(
        replace(
            unit,
            forward_s=forward,
            backward_s=2 * forward,
            weight_h2d_s=h2d,
            gradient_d2h_s=d2h,
            cpu_update_s=update,
            gpu_update_s=0.0,
            accumulate_s=accumulate,
        )
        for unit in base.units
    )
    return replace(base, units=units, stem=tuple(stem))


def stem_unit(role, **times):
    sizes = dict.fromkeys(("weight_bytes", "gradient_bytes", "remainder_bytes", "moment_bytes", "accumulator_bytes"), 1)
    return UnitCost(name=f"stem.{role}", role=role, num_trainable=1, **sizes, **times)


def step_s(problem, plan=None, **options):
    return simulate(problem, plan or leanest_plan(problem), **options).step_s


def test_hidden_copies_and_updates_cost_only_the_first():
    # forward 3 x 2, backward 3 x (2 recompute + 4). What nothing can hide: unit 0's gradient to the host, its update,
    # its weights to the GPU.
    problem = timed(h2d=0.1, d2h=0.2, update=0.3)
    assert step_s(problem) == pytest.approx(24 + 0.2 + 0.3 + 0.1)


def test_slow_updates_are_exposed_by_what_forward_cannot_cover():
    # Three updates of 5 s run one after the other; the last forward starts after all of them.
    assert step_s(timed(update=5.0)) == pytest.approx(3 * 5 + 2 + 18)


def test_first_resident_units_give_the_worker_a_start():
    problem = timed(update=3.0)
    lean = leanest_plan(problem)

    def resident(index):
        units = tuple(replace(u, **ON_GPU) if i == index else u for i, u in enumerate(lean.units))
        return step_s(problem, replace(lean, units=units))

    assert resident(0) == pytest.approx(6 + 2 + 18)  # two updates under one forward, then the last forward
    assert resident(0) < resident(2) == pytest.approx(3 + 3 + 2 + 2 + 18)


def test_slow_links_are_bound_by_slots():
    # A weight copy of 4 s against 2 s of forward. With 3 slots all 3 units stay on the GPU for backward.
    assert step_s(timed(h2d=4.0)) == pytest.approx(4 * 3 + 2 + 18)
    # With 2 slots unit 2's copy waits for unit 0's slot (free at 6), and unit 0 is copied again in backward: its
    # copy starts when unit 2's backward is done, and ends before unit 1's.
    two = replace(timed(h2d=4.0), weight_slots=2)
    assert step_s(two) == pytest.approx(4 * 3 + 2 + 18)


def test_gradient_slots_hold_the_backward_back():
    problem = replace(timed(forward=1.0, d2h=10.0), gradient_slots=2)
    # One unit's gradients in the making, one on their way: two sends inside the backward, the third delays the next
    # step's first update.
    assert step_s(problem) == pytest.approx(3 + 3 + 10 + 10 + 10)


def test_with_one_gradient_slot_backward_waits_for_every_gradient():
    # Only unit 0's weights may be updated and fetched late: its gradient arrives with the end of backward.
    assert step_s(replace(timed(forward=1.0, d2h=10.0), gradient_slots=1)) == pytest.approx(3 + 3 * (3 + 10))


def test_gradients_of_the_stem_take_slots_too():
    """The head's crosses the link while the last unit computes, unless something large has to go after it."""
    head = stem_unit(UnitRole.HEAD, gradient_d2h_s=5.0)
    norm = replace(stem_unit(UnitRole.REST), gradient_bytes=1000)
    assert step_s(timed(stem=[norm, head])) == pytest.approx(24)
    rest = replace(norm, gradient_bytes=SMALL_SEND_BYTES)
    problem = timed(stem=[rest, head])
    lean = leanest_plan(problem)
    norm_on_gpu = replace(lean, stem=(replace(lean.stem[0], **ON_GPU), lean.stem[1]))
    assert step_s(problem, norm_on_gpu) == pytest.approx(24)
    assert step_s(problem) == pytest.approx(24 + 5)
    # With three slots both may be on their way, and the last unit, whose gradients are the third to go, hides them.
    assert step_s(replace(problem, gradient_slots=3)) == pytest.approx(24)
    # The embedding's, the last to go, needs the place of the unit's before it.
    slow = timed(d2h=7.0, stem=[stem_unit(UnitRole.EMBEDDING)])
    resident = replace(leanest_plan(slow), stem=(replace(leanest_plan(slow).stem[0], **ON_GPU),))
    assert step_s(slow) == pytest.approx(step_s(slow, resident))
    assert simulate(slow, leanest_plan(slow)).backward_s == pytest.approx(simulate(slow, resident).backward_s + 7)


def test_gradients_on_a_disk_are_written_as_they_come_and_read_for_their_update():
    """Those that came last, of the units that are updated first, are still in their buffers."""
    problem = replace(timed(4, d2h=0.5), nvme_slots=2, nvme_write_bytes_per_s=1e6, nvme_read_bytes_per_s=2e6)
    units = tuple(
        replace(unit, gradient_bytes=3_000_000, remainder_bytes=1_000_000, moment_bytes=0, weight_bytes=0)
        for unit in problem.units
    )
    problem = replace(problem, units=units)
    plan = leanest_plan(problem).with_units(**HOMES["nvme_gradients"])
    events = {event.name: event for event in simulate(problem, plan, record=True).events}
    seconds = {name: round(event.end_s - event.start_s, 6) for name, event in events.items() if "layers" in name}
    assert {seconds[f"write gradients layers.{u}"] for u in range(4)} == {3.0}
    assert [seconds[f"read layers.{u}"] for u in range(4)] == [0.5, 0.5, 2.0, 2.0]
    assert {seconds[f"write layers.{u}"] for u in range(4)} == {1.0}
    # Unit 1's gradient needs the buffer of unit 3's, which is on the disk 3.5 s after it was computed.
    assert events["gradients layers.1"].start_s >= events["write gradients layers.3"].end_s
    summed = replace(problem, accumulation_steps=2)
    summed = replace(summed, units=tuple(replace(u, accumulate_s=0.25, accumulator_bytes=4_000_000) for u in units))
    events = simulate(summed, plan, record=True).events
    kinds = [event.name for event in events if event.name.endswith("gradients layers.3")]
    assert kinds == ["gradients layers.3", "write gradients layers.3"] + [
        "gradients layers.3",
        "read gradients layers.3",
        "write gradients layers.3",
    ]


def test_kept_units_save_their_recompute():
    problem = timed()
    lean = leanest_plan(problem)
    kept = replace(lean, units=(*lean.units[:2], replace(lean.units[2], activations=Activations.KEEP)))
    assert step_s(problem) - step_s(problem, kept) == pytest.approx(2.0)


def test_resident_weight_with_cpu_updater_pays_one_copy():
    problem = timed(num_units=1, h2d=1.0, update=3.0)
    lean = leanest_plan(problem)
    # In the slot for backward: one copy as well. With several units the streamed ones pay two.
    assert step_s(problem, lean.with_units(weights=Tier.GPU)) == pytest.approx(3 + 1 + 2 + 6)


def test_with_two_state_slots_the_link_waits_for_updates_that_wait_for_kernels():
    # States of a unit come in 2 s and leave in 2 s, in eight chunks, beside a forward of 2 s. An update that finds the
    # GPU busy waits 0.2 s: two slots then bring two chunks in 0.25 + 0.2 + 0.25 s, which four do not see.
    base = timed(5)
    bytes_per_s = base.units[0].rest_state_bytes / 2
    units = tuple(replace(unit, gradient_bytes=0, state_chunks=8) for unit in base.units)
    problem = replace(base, units=units, h2d_bytes_per_s=bytes_per_s, d2h_bytes_per_s=bytes_per_s)
    plan = leanest_plan(problem).with_units(**HOMES["mirror_update"])
    two_s, four_s = (simulate(problem, replace(plan, state_slots=slots)).step_s for slots in (2, 4))
    assert four_s == pytest.approx(2.0 + 5 * 2.0 + 5 * 6.0, abs=0.5)
    # The last updates of a unit find the GPU idle.
    assert 4 * 0.5 < two_s - four_s <= 4 * 0.8


def test_accumulation_updates_once():
    problem = timed(update=5.0, accumulation=4, accumulate=0.5)
    # The last micro-batch's last gradient is added on the host (0.5 s) before the first update.
    assert step_s(problem) == pytest.approx(0.5 + 3 * 5 + 2 + 18 + 3 * 24)


def test_embedding_is_exposed_and_head_is_hidden():
    embedding = stem_unit(UnitRole.EMBEDDING, cpu_update_s=1.0, weight_h2d_s=0.5, gradient_d2h_s=0.25)
    head = stem_unit(UnitRole.HEAD, cpu_update_s=1.0, weight_h2d_s=0.5, gradient_d2h_s=0.25)
    assert step_s(timed(stem=[head])) == pytest.approx(24)
    assert step_s(timed(stem=[embedding])) == pytest.approx(24 + 0.25 + 1.0 + 0.5)


def test_events_never_overlap_on_a_resource_and_fill_the_step():
    times = simulate(timed(h2d=0.7, d2h=0.9, update=1.1), leanest_plan(timed()), record=True)
    for resource in Resource:
        events = [event for event in times.events if event.resource == resource]
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in zip(events, events[1:]))
        assert sum(event.end_s - event.start_s for event in events) == pytest.approx(times.busy_s[resource])
    assert times.compute_s <= times.step_s
    assert times.forward_s + times.backward_s == pytest.approx(times.step_s)


def test_noise_is_reproducible_and_only_delays():
    problem = timed(h2d=0.5, update=1.0)
    quiet = step_s(problem)
    noisy = [step_s(problem, noise_frac=0.2, seed=seed) for seed in (1, 1, 2)]
    assert noisy[0] == noisy[1] != noisy[2]
    assert all(quiet < value <= 1.2 * quiet + 1e-9 for value in noisy)


@pytest.mark.parametrize(("shared", "seconds"), [(0.5, 6 * 4 + 6 * 2), (1.0, 6 * 4), (0.75, 6 * 4 + 6 * 2 / 3)])
def test_reads_and_writes_share_a_disk(shared, seconds):
    # Per unit 4 s of reading and 2 s of writing: one after the other, fully side by side, or in between. While the disk
    # writes, in 2 / 0.75 s, a quarter of its reading is lost: 2 / 3 s.
    base, unit = timed(6, forward=0.0), timed(6, forward=0.0).units[0]
    staged = unit.rest_state_bytes
    rates = {"read": staged / 4.0, "write": staged / 2.0}
    problem = replace(
        base,
        nvme_slots=4,
        **{f"nvme_{name}_bytes_per_s": rate for name, rate in rates.items()},
        **{f"nvme_{name}_shared_bytes_per_s": shared * rate for name, rate in rates.items()},
    )
    plan = leanest_plan(problem)
    on_disk = replace(plan, units=tuple(replace(unit, states=Tier.NVME) for unit in plan.units), nvme_slots=4)
    assert simulate(problem, on_disk, steps=6).step_s == pytest.approx(seconds, rel=1e-6)
