"""The rules by which multi-rank tests hold collectives: each is broken once, and that is noticed."""

from __future__ import annotations

import pytest
import torch

from lazytrain_plugin.comm.hops import Hops
from lazytrain_plugin.comm.topology import Topology
from lazytrain_plugin.runtime.host_memory import HostBuffer
from tests.comm.ranks import succeed
from tests.comm.rules import Rules

pytestmark = pytest.mark.multiprocess


def unlike_other_ranks(hops):
    hops.sum("test", torch.zeros(4, dtype=torch.int32 if hops.rank else torch.float32))


def of_a_dtype_that_nccl_lacks(hops):
    hops.gather("test", torch.zeros(8, dtype=torch.int16), torch.zeros(4, dtype=torch.int16), hops.job)


def of_host_memory(hops):
    memory = HostBuffer(64, pin=False)
    hops.sum("test", memory.tensor(torch.float32, 0, 4))


def changed_too_early(hops):
    sent = torch.ones(4)
    wait = hops.exchange("test", torch.empty(4), sent, hops.job)
    sent.zero_()
    wait()


def never_waited_for(hops):
    hops.gather("test", torch.empty(8), torch.ones(4), hops.job)


BROKEN = {
    unlike_other_ranks: "all_reduce",
    of_a_dtype_that_nccl_lacks: "NCCL has no torch.int16",
    of_host_memory: "host memory in a collective",
    changed_too_early: "changed before the collective was waited for",
    never_waited_for: "never waited for",
}


def each_broken(rank, device):
    said = {}
    for breaks in BROKEN:
        rules = Rules()
        with pytest.raises(AssertionError) as error:
            with rules.applied():
                breaks(Hops(None, Topology.consecutive(2, 2), device, 20))
            rules.compare()
        said[breaks.__name__] = str(error.value)
    return said


def test_what_breaks_a_rule_is_noticed_on_every_rank():
    for said in succeed(each_broken, 2):
        for breaks, text in BROKEN.items():
            assert text in said[breaks.__name__], breaks


def read_too_early(rank, device):
    hops = Hops(None, Topology.consecutive(2, 2), device, 20)
    received = torch.zeros(4)
    wait = hops.exchange("test", received, torch.full((4,), float(rank)), hops.inside)
    early = received.clone()
    wait()
    assert hops.inside is hops.job, "a second communicator of the same ranks takes GPU memory"
    return early, received


def test_a_result_is_not_there_before_it_was_waited_for():
    for rank, (early, received) in enumerate(succeed(read_too_early, 2)):
        assert early.isnan().all() and received.tolist() == [0, 0, 1, 1], rank
