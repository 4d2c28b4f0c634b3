"""The greedy planner: budgets are kept, memory is spent where it is worth most, refusals help."""

from dataclasses import replace

import pytest

from lazytrain_plugin.errors import ConfigError, InfeasiblePlanError, PlanMismatchError
from lazytrain_plugin.plan.check import check_plan
from lazytrain_plugin.plan.greedy import greedy_plan
from lazytrain_plugin.plan.problem import HOST_RESERVE_GPU_BYTES
from lazytrain_plugin.plan.request import Capabilities, PlanRequest
from lazytrain_plugin.plan.result import PlacementPlan
from lazytrain_plugin.units import GIB, MIB
from lazytrain_plugin.vocab import Activations, Tier, Updater
from tests.plan import builders

TOKENS = 2048
FEWER = Capabilities(offloaded_boundaries=True)
"""Families among which the greedy search is quick enough to be asked forty times."""


def resident(plan):
    return [index for index, unit in enumerate(plan.units) if unit.weights == Tier.GPU]


def keeping(plan):
    return [index for index, unit in enumerate(plan.units) if unit.activations == Activations.KEEP]


@pytest.mark.parametrize("extra_mib", [160, 200, 300, 500, 900])
def test_budget_is_kept_and_more_memory_is_never_slower(extra_mib):
    model, machine = builders.model(6), builders.hardware()
    budget = builders.GPU_RESERVE_BYTES + extra_mib * MIB
    plan = greedy_plan(model, machine, PlanRequest(max_tokens=TOKENS, gpu_budget_bytes=budget))
    ledger = check_plan(plan, model, machine, PlanRequest(gpu_budget_bytes=budget))
    assert ledger.total_bytes() == plan.predicted_bytes
    assert plan.predicted_bytes["gpu"] <= budget
    roomier = greedy_plan(model, machine, PlanRequest(max_tokens=TOKENS, gpu_budget_bytes=budget + 100 * MIB))
    assert roomier.predicted_step_s <= plan.predicted_step_s * 1.002


def test_memory_follows_the_budget_in_small_steps():
    """No big jumps between two placements (partial offload is gradual)."""
    model, machine = builders.model(12), builders.hardware()
    unit_bytes = max(14 * 4 * builders.MATRIX**2, 20 * 512 * TOKENS)
    stem_bytes = 14 * 4096 * builders.MATRIX
    used = []
    for extra_mib in range(200, 600, 10):
        budget = builders.GPU_RESERVE_BYTES + extra_mib * MIB
        plan = greedy_plan(model, machine, PlanRequest(max_tokens=TOKENS, gpu_budget_bytes=budget, capabilities=FEWER))
        used.append(plan.predicted_bytes["gpu"])
        if len(resident(plan)) < 12 and len(keeping(plan)) < 12:
            assert budget - used[-1] < unit_bytes + stem_bytes
    assert max(b - a for a, b in zip(used, used[1:])) < unit_bytes + stem_bytes


def test_slow_updates_buy_residency_at_the_start_of_forward():
    slow_worker = builders.hardware(cpu_update_32bit_shared_parameters_per_s=5e7)
    plan = greedy_plan(
        builders.model(8),
        slow_worker,
        PlanRequest(max_tokens=TOKENS, gpu_budget_bytes=builders.GPU_RESERVE_BYTES + 260 * MIB),
    )
    assert resident(plan) and resident(plan) == list(range(len(resident(plan))))
    assert all(plan.units[index].updater == Updater.GPU for index in resident(plan))


def test_fast_updates_buy_kept_activations_at_the_end():
    fast_worker = builders.hardware(
        cpu_update_32bit_shared_parameters_per_s=1e12, h2d_shared_bytes_per_s=1e12, d2h_shared_bytes_per_s=1e12
    )
    plan = greedy_plan(
        builders.model(8),
        fast_worker,
        PlanRequest(max_tokens=TOKENS, gpu_budget_bytes=builders.GPU_RESERVE_BYTES + 260 * MIB),
    )
    assert keeping(plan) and keeping(plan) == list(range(8 - len(keeping(plan)), 8))
    assert not resident(plan)


def test_short_host_memory_moves_units_to_the_gpu():
    model, machine = builders.model(8), builders.hardware()
    host_budget = HOST_RESERVE_GPU_BYTES + 70 * MIB
    plan = greedy_plan(model, machine, PlanRequest(max_tokens=TOKENS, cpu_budget_bytes=host_budget))
    assert resident(plan)
    assert (
        check_plan(plan, model, machine, PlanRequest(cpu_budget_bytes=host_budget)).total_bytes()["cpu"] <= host_budget
    )


def test_without_a_gpu_everything_is_on_the_cpu_and_kept_while_it_fits():
    model, machine = builders.model(4), builders.hardware(gpu_gib=0)
    roomy = greedy_plan(model, machine, PlanRequest(max_tokens=TOKENS))
    assert {unit.weights for unit in (*roomy.units, *roomy.stem)} == {Tier.CPU}
    assert keeping(roomy) == [0, 1, 2, 3]
    assert roomy.predicted_bytes["gpu"] == 0
    tight_bytes = roomy.predicted_bytes["cpu"] - 30 * MIB
    tight = greedy_plan(model, machine, PlanRequest(max_tokens=TOKENS, cpu_budget_bytes=tight_bytes))
    assert keeping(tight) == [2, 3]
    assert tight.predicted_bytes["cpu"] <= tight_bytes


def test_plans_are_deterministic_round_trip_and_carry_digests():
    model, machine = builders.model(5), builders.hardware()
    first, second = (greedy_plan(model, machine, PlanRequest(max_tokens=TOKENS)) for _ in range(2))
    assert first.to_json() == second.to_json()
    assert PlacementPlan.from_json(first.to_json()) == first
    assert first.digests == {"hardware": machine.digest, "model": model.digest}
    assert all(unit.reason for unit in (*first.units, *first.stem))


def test_fidelity_decides_the_state_bits():
    model, machine = builders.model(3), builders.hardware()
    bits = {
        f: greedy_plan(model, machine, PlanRequest(max_tokens=64, fidelity=f)).units[0].state_bits
        for f in ("exact", "balanced")
    }
    assert bits == {"exact": 32, "balanced": 8}


def test_refusal_names_need_have_and_a_remedy_that_works():
    model = builders.model(40)
    machine = builders.hardware(gpu_gib=1.64, cpu_gib=2.8)
    with pytest.raises(InfeasiblePlanError, match=r"host memory: need .* have 2\.8 GiB .*8-bit optimizer states"):
        greedy_plan(model, machine, PlanRequest(max_tokens=64))
    greedy_plan(model, machine, PlanRequest(max_tokens=64, fidelity="balanced", capabilities=FEWER))

    with pytest.raises(InfeasiblePlanError, match=r"GPU memory: need .* have 1\.6 GiB") as caught:
        greedy_plan(model, builders.hardware(gpu_gib=1.6), PlanRequest(max_tokens=32768))
    tokens = int(str(caught.value).split("micro-batch of ")[1].split()[0])
    greedy_plan(model, builders.hardware(gpu_gib=1.6), PlanRequest(max_tokens=tokens))


def test_negative_budget_is_refused():
    with pytest.raises(ConfigError, match="gpu_memory_gib is -1"):
        greedy_plan(builders.model(2), builders.hardware(), PlanRequest(max_tokens=64, gpu_budget_bytes=-GIB))


class TestCheck:
    model, machine = builders.model(3), builders.hardware()

    def plan(self, **options):
        return greedy_plan(self.model, self.machine, PlanRequest(max_tokens=TOKENS, **options))

    def test_over_budget(self):
        with pytest.raises(InfeasiblePlanError, match="gpu memory"):
            check_plan(
                self.plan(), self.model, self.machine, PlanRequest(gpu_budget_bytes=builders.GPU_RESERVE_BYTES + MIB)
            )

    def test_larger_batch_needs_more(self):
        plan = self.plan()
        small, large = (
            check_plan(plan, self.model, self.machine, PlanRequest(max_tokens=tokens)).total_bytes()["gpu"]
            for tokens in (64, 4096)
        )
        assert small < large

    def test_plan_of_another_model(self):
        with pytest.raises(PlanMismatchError, match="another model.*layers.3"):
            check_plan(self.plan(), builders.model(4), self.machine)

    def test_hidden_loss_of_fidelity(self):
        plan = replace(self.plan(), units=tuple(replace(u, state_bits=8) for u in self.plan().units))
        with pytest.raises(PlanMismatchError, match="balanced"):
            check_plan(plan, self.model, self.machine)
        check_plan(replace(plan, fidelity="balanced"), self.model, self.machine)

    def test_stem_off_the_gpu(self):
        plan = self.plan()
        moved = tuple(replace(u, weights=Tier.CPU, states=Tier.CPU, updater=Updater.CPU) for u in plan.stem)
        with pytest.raises(PlanMismatchError, match="stem"):
            check_plan(replace(plan, stem=moved), self.model, self.machine)
