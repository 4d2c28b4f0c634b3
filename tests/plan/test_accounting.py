"""Bytes per tier against sums written out by hand."""

from dataclasses import replace

import pytest

from lazytrain_plugin.plan.accounting import account, nvme_written_bytes, windows
from lazytrain_plugin.plan.greedy import leanest_plan
from lazytrain_plugin.plan.problem import (
    FRAGMENTATION_FRAC,
    HOST_RESERVE_GPU_BYTES,
    SAVED_FRAGMENTATION_FRAC,
    build_problem,
)
from lazytrain_plugin.plan.request import STATE_SLOTS, Capabilities, PlanRequest
from lazytrain_plugin.units import MIB
from lazytrain_plugin.vocab import Activations, Tier, Updater
from tests.plan import builders

N = builders.MATRIX**2  # parameters of one matrix
LAYER = 4 * N
LINES = ("unit inputs", "saved activations", "gradients", "backward workspace", "logits and loss")
STEM = 4096 * builders.MATRIX
TOKENS = 100


def problem_of(**changes):
    model = changes.pop("model", None) or builders.model(3)
    machine = changes.pop("hardware", None) or builders.hardware()
    return build_problem(model, machine, PlanRequest(max_tokens=TOKENS, **changes))


@pytest.mark.parametrize(
    ("bits", "accumulation", "bytes_per_parameter"),
    [
        (32, 1, 2 + 2 + 8 + 2),
        (32, 4, 2 + 2 + 8 + 2 + 4),
        (8, 1, 2 + 2 + 2 * (1 + 4 / 256) + 2),
    ],
)
def test_cpu_units_hold_weights_states_and_gradients_on_the_host(bits, accumulation, bytes_per_parameter):
    problem = problem_of(fidelity="balanced", state_bits=bits, accumulation_steps=accumulation)
    ledger = account(problem, leanest_plan(problem))
    assert ledger.cpu["units: weights and states"] == 3 * LAYER * bytes_per_parameter
    # The stem's GPU weights have a host mirror that the update works on.
    # Embedding and head; the embedding's states have 32 bits in any case.
    embedding = bytes_per_parameter if bits == 32 else 2 + 2 + 8 + 2
    assert ledger.cpu["stem: weights and states"] == STEM * (embedding + bytes_per_parameter)
    assert ledger.gpu["stem: weights and states"] == 2 * STEM * 2
    assert ledger.gpu["weight slots"] == 3 * LAYER * 2


@pytest.mark.parametrize(
    ("accumulation", "bytes_per_parameter"),
    [(1, 2 + 2 + 8 + 1 + 2 / 64), (4, 2 + 2 + 8 + (1 + 2 / 64) + (2 + 2 / 64))],
)
def test_8bit_gradients_halve_what_waits_on_the_host_and_crosses_to_it(accumulation, bytes_per_parameter):
    changes = {"fidelity": "compact", "state_bits": 32, "accumulation_steps": accumulation}
    coded, exact = problem_of(**changes), problem_of(**changes, gradient_bits=16)
    plan = leanest_plan(coded)
    assert account(coded, plan).cpu["units: weights and states"] == 3 * LAYER * bytes_per_parameter
    for cost, before in zip(coded.units, exact.units, strict=True):
        assert cost.gradient_d2h_s == pytest.approx(before.gradient_d2h_s * (1 + 2 / 64) / 2)
        assert cost.accumulate_s == pytest.approx(before.accumulate_s * (1 + 2 / 64 + 4 + 4 / 64) / 10)
        assert cost.streamed_in_bytes < before.streamed_in_bytes
    # While autograd makes them they are what they were.
    assert account(coded, plan).gpu == account(exact, plan).gpu


def test_gpu_states_move_everything_off_the_host():
    problem = problem_of()
    lean = leanest_plan(problem)
    on_gpu = {"weights": Tier.GPU, "states": Tier.GPU, "updater": Updater.GPU}
    plan = replace(lean.with_units(**on_gpu), stem=tuple(replace(unit, **on_gpu) for unit in lean.stem))
    ledger = account(problem, plan)
    assert ledger.gpu["units: weights and states"] == 3 * LAYER * 12
    assert ledger.gpu["stem: weights and states"] == 2 * STEM * 12
    # All gradients rest on the GPU when backward ends; small batches have their peak there.
    assert ledger.gpu["gradients"] == 3 * LAYER * 2 + 2 * STEM * 2
    assert ledger.cpu == {"reserve": HOST_RESERVE_GPU_BYTES}
    assert "weight slots" not in ledger.gpu


def test_fp32_weights_have_no_remainder_and_frozen_ones_no_states():
    fp32 = problem_of(model=builders.model(3, dtype="float32"))
    assert account(fp32, leanest_plan(fp32)).cpu["units: weights and states"] == 3 * LAYER * (4 + 8 + 4)
    frozen = problem_of(model=builders.model(3, trainable=False))
    ledger = account(frozen, leanest_plan(frozen))
    assert ledger.cpu["units: weights and states"] == 3 * LAYER * 2
    # The stem's own: the head's as backward begins, the embedding's at its end.
    assert [window.gradients for window in windows(frozen, leanest_plan(frozen))] == [0, 2 * STEM, 0, 0, 2 * STEM]


def test_windows_of_a_step_by_hand():
    """Later units have let go of what they saved when an earlier one recomputes; their gradients are on their way."""
    problem = problem_of()
    lean = leanest_plan(problem)
    boundary, kept, recompute = 2 * 512 * TOKENS, 20 * 512 * TOKENS, 26 * 512 * TOKENS
    loss = max(TOKENS * 4096 * 2 + 4 * STEM, 6 * STEM) + 3 * TOKENS * 512 * 2
    assert (problem.units[0].boundary_bytes, problem.units[0].kept_bytes) == (boundary, kept)
    gradient, stem = LAYER * 2, STEM * 2

    keep = {"activations": Activations.KEEP}
    plan = replace(lean, units=(replace(lean.units[0], **keep), lean.units[1], replace(lean.units[2], **keep)))
    found = [(window.inputs, window.saved, window.gradients, window.other) for window in windows(problem, plan)]
    assert found == [
        (3 * boundary, 2 * kept, 0, loss),
        # The head's gradient leaves while unit 2 is in backward, then one unit's at a time.
        (3 * boundary, kept, gradient + stem, recompute),
        (2 * boundary, kept, 2 * gradient, recompute),
        (boundary, 0, 2 * gradient, recompute),
        (0, 0, gradient + stem, 0),
    ]
    ledger = account(problem, plan)
    fullest = max(map(sum, found))
    assert sum(ledger.gpu.get(k, 0) for k in LINES) == fullest
    head_room = [int((i + s) * SAVED_FRAGMENTATION_FRAC + (g + o) * FRAGMENTATION_FRAC) for i, s, g, o in found]
    assert ledger.gpu["head-room"] == head_room[[sum(window) for window in found].index(fullest)]


def test_gradients_of_gpu_updated_units_rest_there_until_the_step():
    problem = problem_of()
    on_gpu = {"weights": Tier.GPU, "states": Tier.GPU, "updater": Updater.GPU}
    lean = leanest_plan(problem)
    plan = replace(lean.with_units(**on_gpu), stem=tuple(replace(unit, **on_gpu) for unit in lean.stem))
    gradient, stem = LAYER * 2, STEM * 2
    found = [window.gradients for window in windows(problem, plan)]
    assert found == [0, stem + gradient, stem + 2 * gradient, stem + 3 * gradient, 2 * stem + 3 * gradient]
    # With several micro-batches they are added to the sums, which rest with the states.
    several = problem_of(accumulation_steps=4)
    assert [window.gradients for window in windows(several, plan)] == [0, gradient, gradient, gradient, stem]
    assert account(several, plan).gpu["units: weights and states"] == 3 * LAYER * 16


def test_a_tied_head_holds_its_gradient_through_backward():
    problem = problem_of(model=builders.model(3, tied=True))
    stem = STEM * 2
    gradients = [window.gradients for window in windows(problem, leanest_plan(problem))]
    assert gradients == [0, stem + LAYER * 2, stem + 2 * LAYER * 2, stem + 2 * LAYER * 2, 2 * stem + LAYER * 2]


def test_streamed_states_rest_on_the_host_and_pass_through_slots():
    problem = problem_of(capabilities=Capabilities.everything())
    lean = leanest_plan(problem)
    streams = {"updater": Updater.GPU}
    by_unit = lean.with_units(**streams)
    assert account(problem, by_unit).cpu["units: weights and states"] == 3 * LAYER * 14
    assert account(problem, by_unit).gpu["state slots"] == STATE_SLOTS * LAYER * (2 + 8 + 4)
    # Weights on the GPU need no mirror on the host: the update writes them where they are.
    resident = lean.with_units(weights=Tier.GPU, **streams)
    assert account(problem, resident).cpu["units: weights and states"] == 3 * LAYER * 12
    # A stem tensor passes in chunks.
    stem = replace(lean, stem=tuple(replace(unit, **streams) for unit in lean.stem))
    assert account(problem, stem).gpu["state slots"] == STATE_SLOTS * min(256 * MIB, STEM * 14)
    assert account(problem, stem).cpu["stem: weights and states"] == 2 * STEM * 12


def test_offloaded_activations_leave_the_gpu_but_for_a_ring():
    problem = problem_of()
    lean = leanest_plan(problem)
    boundary, kept = 2 * 512 * TOKENS, 20 * 512 * TOKENS
    inputs = lean.with_units(boundary=Tier.CPU)
    assert [window.inputs for window in windows(problem, inputs)] == [0] * 5
    assert account(problem, inputs).cpu["offloaded activations"] == 3 * boundary
    assert account(problem, inputs).gpu["activation slots"] == 2 * boundary
    both = lean.with_units(boundary=Tier.CPU, activations=Activations.KEEP, saved=Tier.CPU)
    assert account(problem, both).cpu["offloaded activations"] == 3 * (boundary + kept)
    assert account(problem, both).gpu["activation slots"] == 2 * (boundary + kept)


def test_nvme_holds_gradients_and_activations_where_a_plan_says_so():
    """Host memory has a few staging buffers of each: `nvme_slots`, no more than there are units."""
    problem = problem_of(accumulation_steps=2)
    lean = leanest_plan(problem)
    on_disk = account(problem, replace(lean, nvme_slots=2).with_units(states=Tier.NVME, gradients=Tier.NVME))
    assert on_disk.nvme == {"units: weights and states": 3 * LAYER * (10 + 2 + 4)}
    assert on_disk.cpu["units: weights and states"] == 3 * LAYER * 2
    assert on_disk.cpu["NVMe slots"] == 2 * LAYER * (10 + 2 + 4)
    plan = replace(lean, nvme_slots=2).with_units(boundary=Tier.NVME)
    boundary = problem.units[0].boundary_bytes
    activations = account(problem, plan)
    assert activations.nvme == {"activations": 3 * boundary}
    assert activations.cpu["NVMe slots"] == 2 * boundary and "offloaded activations" not in activations.cpu
    assert nvme_written_bytes(problem, plan) == 2 * 3 * boundary


def test_nvme_holds_states_and_weights_but_no_gradients():
    problem = problem_of()
    lean = leanest_plan(problem)
    states = account(problem, lean.with_units(states=Tier.NVME))
    assert states.nvme == {"units: weights and states": 3 * LAYER * 10}
    assert states.cpu["units: weights and states"] == 3 * LAYER * 4
    assert states.cpu["NVMe slots"] == 3 * LAYER * 10
    both = account(problem, lean.with_units(weights=Tier.NVME, states=Tier.NVME))
    assert both.nvme == {"units: weights and states": 3 * LAYER * 12}
    assert both.cpu["units: weights and states"] == 3 * LAYER * 2


def test_buffers_of_nvme_hold_pieces_of_states_and_each_kind_for_itself():
    """Large units pass 256 MiB of states at a time; one unit's weights and another's gradients need both buffers."""
    problem = problem_of(model=builders.model(3, matrices=512))
    cost, lean = problem.units[0], leanest_plan(problem)
    assert cost.rest_state_bytes == 512 * 512**2 * 10  # 1.25 GiB
    states = lean.with_units(states=Tier.NVME)
    assert account(problem, states).cpu["NVMe slots"] == 3 * cost.rest_state_bytes // 5
    first, second = replace(states.units[0], weights=Tier.NVME), replace(states.units[1], gradients=Tier.NVME)
    mixed = replace(states, units=(first, second, states.units[2]))
    slots = 3 * cost.rest_state_bytes // 5 + cost.weight_bytes + cost.gradient_bytes
    assert account(problem, mixed).cpu["NVMe slots"] == slots


def test_between_steps_a_checkpoint_and_an_evaluation_must_fit():
    problem = problem_of(evaluation_tokens=64 * 1024)
    ledger = account(problem, leanest_plan(problem))
    logits = 64 * 1024 * (4096 * (2 + 4) + 2 * 512 * 2)
    rest = sum(ledger.gpu[k] for k in ("stem: weights and states", "weight slots", "reserve"))
    assert ledger.outside_step["evaluation"]["gpu"] == rest + int(logits * (1 + FRAGMENTATION_FRAC))
    assert ledger.need_bytes()["gpu"] == ledger.outside_step["evaluation"]["gpu"] > ledger.total_bytes()["gpu"]
    assert ledger.need_bytes()["cpu"] == ledger.total_bytes()["cpu"] + 10 * STEM  # both moments, in codes too


def test_without_a_gpu_everything_is_host_memory():
    with_gpu, without = problem_of(), problem_of(hardware=builders.hardware(gpu_gib=0))
    ledger = account(without, leanest_plan(without))
    assert ledger.gpu == {}
    assert ledger.cpu["weight slots"] == account(with_gpu, leanest_plan(with_gpu)).gpu["weight slots"]


def test_odd_tensors_are_padded_as_the_flats_pad_them():
    odd = builders.layer(0, tensors=(builders.tensor("odd", 1, 257), builders.tensor("small", 1, 3)))
    assert odd.weight_bytes == 2 * 1024  # 514 and 6 bytes, each at a multiple of 1024
    assert odd.state_numel == 512 + 256
    # Both are too small for 8-bit states: fp32 moments stand beside their unused codes.
    assert odd.exact_numel == 768 and odd.moment_bytes(8) == 2 * (768 + 4 * 3) + 8 * 768
    assert odd.remainder_bytes == 2 * 768
