"""Whether a process has written to weights that ranks have in common: asked before every forward, of all of them."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from lazytrain_plugin.runtime import private_look
from lazytrain_plugin.runtime.private_look import PrivateLook

PAGES = 6


class Look(PrivateLook):
    def __init__(self, descriptor: int) -> None:
        self.nbytes = PAGES * mmap.PAGESIZE
        shared, self._private = (
            mmap.mmap(descriptor, self.nbytes, flags=kind) for kind in (mmap.MAP_SHARED, mmap.MAP_PRIVATE)
        )
        self._bytes = self._read_from = torch.frombuffer(shared, dtype=torch.uint8)


@pytest.fixture(params=["by a scan", "page by page"])
def look(request, monkeypatch):
    if request.param == "page by page":
        monkeypatch.setattr(private_look, "_can_scan", lambda: False)
    elif not private_look._can_scan():
        pytest.skip("needs Linux 6.7")
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, PAGES * mmap.PAGESIZE)
    yield Look(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("place", [0, 3 * mmap.PAGESIZE + 5, PAGES * mmap.PAGESIZE - 1])
def test_a_write_is_noticed_until_it_is_forgotten_and_what_is_read_is_none(look, place):
    assert not look.was_written()
    look._bytes[place] = 7
    shown = look.shown(torch.uint8, 0, look.nbytes)
    assert shown[place] == 7 and shown.sum() == 7
    assert not look.was_written()
    shown[place] = 8
    assert look.was_written() and look._bytes[place] == 7
    look.forget_writes()
    assert not look.was_written() and shown[place] == 7
