"""The quick replay gives the numbers of the simulator and the accounting, to the last bit."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from lazytrain_plugin.plan.accounting import account
from lazytrain_plugin.plan.choices import HOMES, STEM_HOMES, allows_home, saving_choices
from lazytrain_plugin.plan.cluster import Cluster
from lazytrain_plugin.plan.greedy import fits, leanest_plan
from lazytrain_plugin.plan.problem import build_problem
from lazytrain_plugin.plan.replay import Judge
from lazytrain_plugin.plan.request import Capabilities, PlanRequest
from lazytrain_plugin.plan.simulate import simulate
from lazytrain_plugin.profile.hardware import HardwareProfile
from lazytrain_plugin.units import GIB, MIB
from lazytrain_plugin.vocab import Activations, Shard, Tier
from tests.plan import builders
from tests.plan.shapes import profile

HARDWARE = Path(__file__).parents[2] / "configs" / "hardware"


def random_plan(problem, draw):
    """Any home, any way to save, any number of slots."""
    lean = leanest_plan(problem)

    def unit(cost, unit):
        homes = [home for home in HOMES if allows_home(problem, cost, home)]
        activations, saved = draw.choice([(Activations.RECOMPUTE, Tier.GPU), *saving_choices(problem, cost)])
        boundary = draw.choice((Tier.GPU, Tier.GPU, Tier.CPU))
        bits = draw.choice((16, cost.planned_bits(activations)))
        return replace(
            unit,
            **HOMES[draw.choice(homes)],
            activations=activations,
            saved=saved,
            saved_bits=bits,
            boundary=boundary,
            boundary_bits=bits if activations in (Activations.MATMULS, Activations.KEEP) else 16,
        )

    stem_homes = STEM_HOMES if problem.capabilities.streamed_states else {"cpu": STEM_HOMES["cpu"]}
    return replace(
        lean,
        units=tuple(map(unit, problem.units, lean.units)),
        stem=tuple(
            replace(part, **STEM_HOMES[draw.choice(list(stem_homes))]) if cost.num_trainable else part
            for cost, part in zip(problem.stem, lean.stem)
        ),
        weight_slots=draw.choice((2, 3, 6)),
        gradient_slots=draw.choice((1, 2, 4)),
        state_slots=draw.choice((1, 2, 3)),
        activation_slots=draw.choice((1, 2)),
        nvme_slots=draw.choice((1, 2, 3)),
    )


def shaped_problem(file, fidelity, accumulation):
    model = profile("7b")
    request = PlanRequest(max_tokens=4096, fidelity=fidelity, accumulation_steps=accumulation, evaluation_tokens=50_000)
    machine = HardwareProfile.load(HARDWARE / f"{file}.json")
    return build_problem(replace(model, units=model.units[::3]), machine, request)


def small_problem(accumulation, *, tied=False, frozen=(), capabilities=None, local_ranks=1, cluster=None, **hardware):
    model = builders.model(6, tied=tied)
    units = tuple(builders.layer(i, trainable=i not in frozen) for i in range(6))
    nodes, shard = (1, Shard.NODE) if cluster is None else (cluster.nodes, SHARDS[cluster.shards_job])
    request = PlanRequest(
        max_tokens=2048,
        accumulation_steps=accumulation,
        local_ranks=local_ranks,
        nodes=nodes,
        shard=shard,
        cluster=cluster,
    )
    request = request if capabilities is None else replace(request, capabilities=capabilities)
    return build_problem(replace(model, units=units), builders.hardware(**hardware), request)


SHARDS = (Shard.NODE, Shard.JOB)


def two_by_two(network_bytes_per_s, **options):
    return Cluster(
        **options,
        nodes=2,
        ranks_per_node=2,
        network_bytes_per_s=network_bytes_per_s,
        inside_bytes_per_s=1e9,
        wire_bytes_per_element=8,
    )


PROBLEMS = {
    "states in chunks": lambda: shaped_problem("h200_1x", "balanced", 1),
    "codes": lambda: shaped_problem("rtx4090_128gb", "compact", 1),
    "codes accumulated": lambda: shaped_problem("rtx4090_128gb", "compact", 3),
    "small": lambda: small_problem(1),
    "tied, accumulated": lambda: small_problem(3, tied=True),
    "two ranks": lambda: small_problem(1, local_ranks=2),
    "two nodes": lambda: small_problem(2, local_ranks=2, frozen=(1,), cluster=two_by_two(1e9)),
    "a slow network": lambda: small_problem(3, local_ranks=2, tied=True, cluster=two_by_two(2e7)),
    "states over two nodes": lambda: small_problem(
        2, local_ranks=2, frozen=(1,), cluster=two_by_two(1e9, shards_job=True)
    ),
    "states over slow nodes": lambda: small_problem(1, local_ranks=2, cluster=two_by_two(1e8, shards_job=True)),
    "frozen units": lambda: small_problem(1, frozen=(0, 3)),
    "a disk": lambda: small_problem(
        1,
        frozen=(2,),
        capabilities=Capabilities.everything(),
        nvme_bytes=GIB,
        nvme_read_bytes_per_s=2e8,
        nvme_write_bytes_per_s=2e8,
    ),
    "a disk of full duplex, accumulated": lambda: small_problem(
        2,
        capabilities=replace(Capabilities.everything(), streamed_states=False),
        local_ranks=2,
        nvme_bytes=GIB,
        nvme_read_bytes_per_s=4e8,
        nvme_write_bytes_per_s=1e8,
        nvme_read_shared_bytes_per_s=4e8,
        nvme_write_shared_bytes_per_s=1e8,
    ),
    "no GPU": lambda: small_problem(1, gpu_gib=0, capabilities=Capabilities(strategies=frozenset(Activations))),
}


@pytest.mark.parametrize("which", PROBLEMS)
def test_bit_for_bit(which):
    problem, draw = PROBLEMS[which](), random.Random(which)
    judge = Judge(problem)
    for _ in range(25):
        plan = random_plan(problem, draw)
        assert judge.need_bytes(plan) == account(problem, plan).need_bytes()
        for steps in (1, 2, 3):
            assert judge.step_s(plan, steps=steps) == simulate(problem, plan, steps=steps).step_s


def test_what_fits_is_what_the_accounting_says():
    problem, draw = PROBLEMS["a disk"](), random.Random(1)
    plans = [random_plan(problem, draw) for _ in range(30)]
    for extra in range(0, 900, 90):
        tight = replace(problem, gpu_budget_bytes=GIB + extra * MIB, nvme_write_bytes_per_day=extra * 1e9)
        judge = Judge(tight)
        assert [judge.fits(plan) for plan in plans] == [fits(tight, plan) for plan in plans]
