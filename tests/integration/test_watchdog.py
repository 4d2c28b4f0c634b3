"""A stuck phase is named; a finished one and the user's own time are not."""

import threading
import time

import pytest

from lazytrain_plugin.integration.watchdog import Watchdog


@pytest.mark.parametrize("timeout_s", [0.2, 0.0])
def test_long_phase_is_reported_once_by_name(timeout_s, caplog):
    watchdog = Watchdog(timeout_s, rank=3)
    with watchdog.phase("forward"), watchdog.phase("placing weights"):
        time.sleep(0.7)
    watchdog.close()
    expected = 1 if timeout_s else 0
    assert caplog.text.count("rank 3 has been in phase 'placing weights'") == expected
    assert caplog.text.count("rank 3") == expected


def test_short_phases_and_idle_time_are_silent(caplog):
    threads = threading.active_count()
    watchdog = Watchdog(0.3, rank=0)
    for _ in range(8):
        with watchdog.phase("forward"):
            time.sleep(0.05)
    time.sleep(0.6)
    watchdog.close()
    assert not caplog.text
    assert threading.active_count() == threads
