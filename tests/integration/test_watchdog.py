"""A stuck phase is named; a finished one and the user's own time are not."""

import threading
import time
from types import SimpleNamespace

import pytest

from lazytrain_plugin.integration import watchdog as module
from lazytrain_plugin.integration.watchdog import Watchdog


class Clock:
    """What the watchdog reads; it moves when a test says so, however busy the machine is."""

    def __init__(self):
        self.now_s, self.looks = 0.0, 0

    def monotonic(self):
        if threading.current_thread() is not threading.main_thread():
            self.looks += 1
        return self.now_s

    def pass_by(self, seconds):
        """Time passes, and the watchdog looks (twice: the first look may have begun before)."""
        self.now_s += seconds
        seen, until_s = self.looks, time.monotonic() + 30
        while self.looks < seen + 2:
            assert time.monotonic() < until_s
            time.sleep(0.001)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def test_long_phase_is_reported_once_by_name(clock, caplog):
    watchdog = Watchdog(0.2, rank=3)
    with watchdog.phase("forward"), watchdog.phase("placing weights"):
        clock.pass_by(0.19)
        assert not caplog.text
        clock.now_s += 0.02
        until_s = time.monotonic() + 30
        while "rank 3" not in caplog.text:
            assert time.monotonic() < until_s
            time.sleep(0.001)
        clock.now_s += 10
        time.sleep(0.2)  # three looks: it was told once
    watchdog.close()
    assert caplog.text.count("rank 3 has been in phase 'placing weights'") == caplog.text.count("rank 3") == 1


def test_switched_off(clock, caplog):
    threads = threading.active_count()
    watchdog = Watchdog(0.0, rank=3)
    with watchdog.phase("forward"):
        clock.now_s += 1e6
        assert threading.active_count() == threads
    watchdog.close()
    assert not caplog.text


def test_short_phases_and_idle_time_are_silent(clock, caplog):
    threads = threading.active_count()
    watchdog = Watchdog(0.2, rank=0)
    for _ in range(3):
        with watchdog.phase("forward"):
            clock.pass_by(0.19)
    clock.now_s += 10
    time.sleep(0.1)
    with watchdog.phase("forward"):
        clock.pass_by(0.19)
    watchdog.close()
    assert not caplog.text
    assert threading.active_count() == threads
