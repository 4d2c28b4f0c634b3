"""Several ranks of a node with homes on NVMe: the same bits as in host memory, and one failing disk ends all of them.

One set of processes runs every case: starting them takes longer than training.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lazytrain_plugin.runtime import activation_store
from lazytrain_plugin.runtime.nvme.tier import NvmeTier
from lazytrain_plugin.runtime.rank_group import RankGroup
from tests.comm.ranks import succeed
from tests.runtime.nvme.rig import assert_same, full_state, on_nvme
from tests.runtime.rig import make_executor, plan_for
from tests.runtime.test_several_ranks import DEVICES, MODELS, global_batches

STEPS = 4
pytestmark = pytest.mark.multiprocess

CASES = {
    "fp32": {"dtype": torch.float32},
    "bf16, clipped": {"max_norm": 0.1},
    "8 bit": {"state_bits": 8},
    "8 bit, few codes": {"state_bits": 8, "least_coded_numel": 300},
    "accumulation": {"accumulation": 2, "max_norm": 0.1, "slots": 1},
    "weights on the GPU": {"home": "mirror"},
    "every second unit": {"every": 2},
    "twice": {"model": "twice"},
    "skips": {"model": "skips"},
    "tied": {"model": "tied"},
    "frozen": {"model": "frozen"},
}


def run_case(
    ranks, device, tier, *, model="wide", home="cpu", state_bits=32, dtype=torch.bfloat16, least_coded_numel=0,
    max_norm=0.0, accumulation=1, slots=2, every=1, moves=(),
):  # fmt: skip
    """Norms, masters and states after some steps; `tier`: None keeps everything in host memory.

    `moves`: other plans, one for each step after the first, made of the first one.
    """
    torch.manual_seed(7 if ranks.is_first else 8)  # the first rank's weights count
    model = MODELS[model]()
    plan = plan_for(model, home=home, state_bits=state_bits, device=device.type)
    first = plan if tier is None or moves else on_nvme(plan, slots=slots, every=every)
    executor = make_executor(
        model, first, device=str(device), native=True, dtype=dtype, least_coded_numel=least_coded_numel, ranks=ranks,
        nvme=tier,
    )  # fmt: skip
    data, norms = iter(global_batches(STEPS * accumulation, ranks.size)), []
    for step in range(STEPS):
        for micro in range(accumulation):
            executor.begin_forward()
            executor.set_last_micro_batch(micro == accumulation - 1)
            ids = next(data).chunk(ranks.size)[ranks.rank].to(device)
            (model.loss(ids) / accumulation).backward()
            executor.end_backward()
        norms.append(executor.step(max_norm)[0].total)
        if step < len(moves):
            executor.place(moves[step](plan))
    executor.flush()
    found = {"norms": torch.tensor(norms, dtype=torch.float64), **full_state(executor)}
    if tier is not None and not moves:
        assert tier.used_bytes > 0
    executor.close()
    return found


def every_case(rank, device, disk):
    activation_store.SMALLEST_BYTES = 1
    ranks = RankGroup(device)
    tier = partial(NvmeTier, [disk], block_bytes=4096, delay_s=0.001)
    return {name: [run_case(ranks, device, t, **case) for t in (None, tier())] for name, case in CASES.items()}


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_as_in_host_memory(device, disk):
    """S-15, S-16, S-19, S-22: states on disk, every request late."""
    first, second = succeed(every_case, 2, str(disk), device=device, timeout_s=200)
    for name in CASES:
        in_memory, on_disk = first[name]
        assert_same(on_disk, in_memory)
        assert_same(second[name][1], in_memory)
    assert not list(disk.iterdir())
