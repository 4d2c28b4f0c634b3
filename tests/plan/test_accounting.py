"""Bytes per tier against sums written out by hand."""

from dataclasses import replace

import pytest

from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.greedy import leanest_plan
from lazytrain_plugin.plan.problem import FRAGMENTATION_FRAC, build_problem
from lazytrain_plugin.plan.request import PlanRequest
from lazytrain_plugin.units import GIB
from lazytrain_plugin.vocab import Activations, Tier, Updater
from tests.plan import builders

N = builders.MATRIX**2  # parameters of one matrix
LAYER = 4 * N
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
    assert ledger.cpu["stem: weights and states"] == 2 * STEM * bytes_per_parameter
    assert ledger.gpu["stem: weights and states"] == 2 * STEM * 2
    assert ledger.gpu["stem: gradients on their way"] == 2 * STEM * 2
    assert ledger.gpu["weight slots"] == 3 * LAYER * 2
    assert ledger.gpu["gradient slots"] == 2 * LAYER * 2


def test_gpu_states_move_everything_off_the_host():
    problem = problem_of()
    lean = leanest_plan(problem)
    on_gpu = {"weights": Tier.GPU, "states": Tier.GPU, "updater": Updater.GPU}
    plan = replace(lean.with_units(**on_gpu), stem=tuple(replace(unit, **on_gpu) for unit in lean.stem))
    ledger = account(problem, plan)
    assert ledger.gpu["units: weights and states"] == 3 * LAYER * 14
    assert ledger.gpu["stem: weights and states"] == 2 * STEM * 14
    assert ledger.cpu == {"reserve": 3 * GIB}
    assert "weight slots" not in ledger.gpu and "gradient slots" not in ledger.gpu


def test_fp32_weights_have_no_remainder_and_frozen_ones_no_states():
    fp32 = problem_of(model=builders.model(3, dtype="float32"))
    assert account(fp32, leanest_plan(fp32)).cpu["units: weights and states"] == 3 * LAYER * (4 + 8 + 4)
    frozen = problem_of(model=builders.model(3, trainable=False))
    ledger = account(frozen, leanest_plan(frozen))
    assert ledger.cpu["units: weights and states"] == 3 * LAYER * 2
    assert "gradient slots" not in ledger.gpu


def test_activation_peak_is_the_fullest_window():
    """Kept activations of later units are freed before an earlier unit recomputes."""
    problem = problem_of()
    lean = leanest_plan(problem)
    cost = problem.units[0]
    boundary, kept, recompute = 2 * 512 * TOKENS, 20 * 512 * TOKENS, 26 * 512 * TOKENS
    loss = TOKENS * 4096 * (2 + 8) + 4 * STEM + TOKENS * 512 * 2
    assert (cost.boundary_bytes, cost.kept_bytes, problem.loss_bytes) == (boundary, kept, loss)

    def peak(flags):
        units = tuple(
            replace(u, activations=Activations.KEEP if keep else Activations.RECOMPUTE)
            for u, keep in zip(lean.units, flags)
        )
        ledger = account(problem, replace(lean, units=units))
        lines = ("unit inputs", "kept activations", "backward workspace", "logits and loss")
        total = sum(ledger.gpu.get(line, 0) for line in lines)
        assert ledger.gpu["head-room"] == int(total * FRAGMENTATION_FRAC)
        return total

    windows = {
        (0, 0, 0): max(3 * boundary + loss, 3 * boundary + recompute),
        (0, 0, 1): max(3 * boundary + kept + loss, 3 * boundary + recompute, 2 * boundary + recompute),
        (1, 0, 0): max(3 * boundary + kept + loss, 3 * boundary + kept + recompute),
    }
    for flags, expected in windows.items():
        assert peak(flags) == expected


def test_without_a_gpu_everything_is_host_memory():
    with_gpu, without = problem_of(), problem_of(hardware=builders.hardware(gpu_gib=0))
    ledger = account(without, leanest_plan(without))
    assert ledger.gpu == {}
    assert ledger.cpu["weight slots"] == account(with_gpu, leanest_plan(with_gpu)).gpu["weight slots"]


def test_odd_tensors_are_padded_as_the_flats_pad_them():
    odd = builders.layer(0, tensors=(builders.tensor("odd", 1, 257), builders.tensor("small", 1, 3)))
    assert odd.weight_bytes == 2 * 1024  # 514 and 6 bytes, each at a multiple of 1024
    assert odd.state_numel == 512 + 256
    assert odd.moment_bytes(8) == 2 * (768 + 4 * 3)
    assert odd.remainder_bytes == 2 * 768
