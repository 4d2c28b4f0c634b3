"""Ranks of which one is ahead: what they have in common changes only where all of them have come.

One set of processes runs every case: starting them takes longer than training.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lazytrain_plugin.comm.topology import Topology
from lazytrain_plugin.runtime.cpu_update import CpuUpdates
from lazytrain_plugin.runtime.rank_group import RankGroup
from lazytrain_plugin.vocab import Shard
from tests.comm.ranks import stay_until_told, succeed
from tests.runtime.rig import make_executor, plan_for
from tests.runtime.test_several_ranks import DEVICES, MODELS, global_batches, weights

pytestmark = pytest.mark.multiprocess


def executor_for(ranks, device, home):
    torch.manual_seed(7)
    model = MODELS["wide"]()
    plan = plan_for(model, home=home, device=device.type)
    return make_executor(model, plan, device=str(device), native=True, dtype=torch.bfloat16, ranks=ranks)


def run(executor, ranks, device, *, step=True):
    executor.begin_forward()
    ids = global_batches(1, ranks.size)[0].chunk(ranks.size)[ranks.rank].to(device)
    executor.model.loss(ids).backward()
    executor.end_backward()
    if step:
        executor.step(0.0)


def changed_by_all(ranks, device, home, folder):
    """A weight after an update, after all ranks have halved it, and in the next forward. The second rank fetches what
    the update made only once the first one is on its way to that forward."""
    executor = executor_for(ranks, device, home)
    unit, weight = executor.units[0], executor.units[0].module.up.weight
    started, publish = Path(folder, f"{home} forward of the first"), CpuUpdates._publish

    def late(self, of, *args):
        if ranks.rank == 1 and of is unit:
            stay_until_told(started)
        publish(self, of, *args)

    CpuUpdates._publish = late
    run(executor, ranks, device)
    with torch.no_grad():
        weight.mul_(0.5)
    own = weight.detach().clone()
    take_over = executor._outside.take_over

    def starts():
        take_over()
        if ranks.rank == 0:
            started.touch()

    executor._outside.take_over = starts
    run(executor, ranks, device, step=False)
    CpuUpdates._publish = publish
    executor.flush()
    found = own, weight.detach().clone(), weights(executor)
    executor.close()
    return found


def changed_apart(ranks, device, home, factors):
    """A weight before and after each rank has multiplied it by another factor, and all weights a step later."""
    executor = executor_for(ranks, device, home)
    weight = executor.units[0].module.up.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(factors[ranks.rank])
    run(executor, ranks, device, step=False)
    after = weight.detach().clone()
    executor.step(0.0)
    executor.flush()
    found = before, after, weights(executor)
    executor.close()
    return found


def every_case(rank, device, folder):
    node = RankGroup(device)
    nodes = {shard: RankGroup(device, topology=Topology.consecutive(2, 1), shard=shard) for shard in Shard}
    return {
        "all": {home: changed_by_all(node, device, home, folder) for home in ("cpu", "mirror", "streamed from gpu")},
        "apart": {
            (home, name, factors): changed_apart(ranks, device, home, factors)
            for home in ("cpu", "mirror")
            for name, ranks in {"one node": node, **nodes}.items()
            for factors in ((1.0, 0.5), (0.5, 0.25))
        },
    }


@pytest.fixture(scope="module", params=DEVICES)
def two(request, tmp_path_factory):
    return succeed(every_case, 2, str(tmp_path_factory.mktemp("ranks")), device=request.param)


def test_a_change_by_all_ranks_counts_once_on_a_rank_that_is_late(two):
    (first, second) = (rank["all"] for rank in two)
    for home, (own, seen, masters) in first.items():
        late_own, late_seen, late_masters = second[home]
        assert torch.equal(own, late_own) and torch.equal(seen, own) and torch.equal(late_seen, own), home
        assert all(torch.equal(late_masters[name], value) for name, value in masters.items()), home


def test_ranks_that_change_a_weight_apart_get_what_the_first_of_them_made(two):
    """On all nodes; and no rank waits for one that knows of no change."""
    for case, (before, after, masters) in two[0]["apart"].items():
        other_before, other_after, other_masters = two[1]["apart"][case]
        assert torch.equal(before, other_before), case
        assert torch.equal(after, before * 0.5) and torch.equal(after, other_after), case
        assert all(torch.equal(other_masters[name], value) for name, value in masters.items()), case
