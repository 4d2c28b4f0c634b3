"""Buffers between disk and memory: what is acquired is what was released last, under any order and any delay."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from lazytrain_plugin.runtime.nvme.staging import Staging
from lazytrain_plugin.runtime.nvme.states import NvmeStates
from lazytrain_plugin.runtime.nvme.tier import NvmeTier

NUMEL = 5000


class Rig:
    def __init__(self, disk, *, count: int, slots: int, delay_s: float = 0.0) -> None:
        self.tier = NvmeTier([disk], block_bytes=8192, delay_s=delay_s)
        self.staging = Staging(slots, 65536, pin=False)
        flats = [("a", torch.float32, NUMEL), ("b", torch.int16, NUMEL)]
        self.states = [NvmeStates(self.tier, self.staging, flats, what=f"thing {i}") for i in range(count)]

    def read_bytes(self) -> int:
        return self.tier.engine.moved_bytes()[0]

    def close(self) -> None:
        self.tier.close()
        self.staging.close()


@pytest.fixture
def rig(disk):
    made = []

    def make(**kwargs) -> Rig:
        made.append(Rig(disk, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("write_now", [True, False])
@pytest.mark.parametrize("delay_s", [0.0, 0.002])
def test_any_order_of_changes(rig, slots, write_now, delay_s):
    one = rig(count=4, slots=slots, delay_s=delay_s)
    expected, chance = [0] * 4, random.Random(slots)
    for turn in range(60):
        if turn % 5 == 0:
            one.staging.read_ahead([one.states[chance.randrange(4)] for _ in range(3)])
        which, changes = chance.randrange(4), chance.random() < 0.6
        with one.states[which].in_memory(changes=changes, write_now=write_now):
            for flat in one.states[which].tensors.values():
                assert (flat == expected[which]).all(), (turn, which)
                if changes:
                    flat.fill_(turn)
            expected[which] = turn if changes else expected[which]
    one.staging.drain()
    assert one.staging.allocated_bytes <= slots * one.staging.nbytes


def test_reads_run_ahead_of_use_and_nothing_is_read_twice(rig):
    one = rig(count=6, slots=3, delay_s=0.01)
    for states in one.states:
        with states.in_memory(changes=True, write_now=True):
            states.tensors["a"].fill_(1)
    one.staging.drain()
    before = one.read_bytes()
    for _ in range(2):
        one.staging.read_ahead(one.states)
        for states in one.states:
            with states.in_memory(changes=True, write_now=True):
                pass
    one.staging.drain()
    assert one.read_bytes() - before <= 12 * one.states[0].region.padded_bytes


def test_use_takes_what_was_read_ahead(rig):
    one = rig(count=3, slots=2, delay_s=0.05)
    for states in one.states:
        with states.in_memory(changes=True):
            states.tensors["a"].fill_(1)
    one.staging.drain()
    one.staging.read_ahead(one.states[:2])
    deadline_s = time.monotonic() + 60
    while not all(one.staging.holds(states) for states in one.states[:2]):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    before = one.read_bytes()
    for states in one.states[:2]:
        with states.in_memory(changes=False):
            assert (states.tensors["a"] == 1).all()
    assert one.read_bytes() == before


def test_nested_use_shares_one_buffer(rig):
    one = rig(count=1, slots=1)
    states = one.states[0]
    with states.in_memory(changes=False):
        with states.in_memory(changes=True):
            states.tensors["a"].fill_(3)
        assert (states.tensors["a"] == 3).all()
    assert not states.tensors
    one.staging.drain()
    one.staging.forget(states)
    with states.in_memory(changes=False):
        assert (states.tensors["a"] == 3).all()


def test_two_threads_share_the_buffers(rig):
    one = rig(count=4, slots=1, delay_s=0.001)
    problems = []

    def work(mine: list[NvmeStates]) -> None:
        try:
            for turn in range(15):
                for states in mine:
                    with states.in_memory(changes=True, write_now=turn % 2 == 0):
                        assert (states.tensors["b"] == turn).all()
                        states.tensors["b"].fill_(turn + 1)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(one.states[i::2],)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "the threads wait for each other"
    assert not problems
