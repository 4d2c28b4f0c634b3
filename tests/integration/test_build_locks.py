"""S-02: a lock that a killed build left is named, and not waited on; one that somebody holds is."""

import os
import subprocess
import sys
import threading
import time

import pytest
from torch.utils.file_baton import FileBaton

from lazytrain_plugin.integration import build_locks, doctor, hook
from lazytrain_plugin.integration.build_locks import find_locks, wait_for_builder
from lazytrain_plugin.integration.findings import Status

BATON = """
import os, sys, time
os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)  # as torch's FileBaton does, without importing torch
print("building", flush=True)
time.sleep(60)
"""


@pytest.fixture(params=["py311_cpu", ""], ids=["default", "named root"])
def folder(tmp_path, monkeypatch, request):
    """Where torch builds DeepSpeed's op."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / request.param / build_locks.SHARED_MEMORY_OP
    folder.mkdir(parents=True)
    return folder


def killed_builder(lock):
    """A process that takes torch's lock and is killed in the middle of the build."""
    process = subprocess.Popen([sys.executable, "-S", "-c", BATON, str(lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "building\n"
    return process


def age(lock, seconds):
    os.utime(lock, (time.time() - seconds,) * 2)


def test_a_lock_counts_from_when_its_holder_is_killed(folder):
    lock = folder / "lock"
    process = killed_builder(lock)
    assert find_locks() == []
    process.kill()
    process.wait()
    assert find_locks() == [lock]
    age(lock, 120)
    assert wait_for_builder() == lock
    (finding,) = doctor.check_build_locks()
    assert finding.status == Status.WARNING and str(lock) in finding.detail and finding.remedy.endswith(f"rm {lock}")
    lock.unlink()
    assert wait_for_builder() is None and list(doctor.check_build_locks()) == []


def test_torchs_own_lock_is_seen_as_held(folder):
    baton = FileBaton(str(folder / "lock"))
    assert baton.try_acquire()
    age(folder / "lock", 3600)
    assert find_locks() == [] and wait_for_builder() is None
    baton.release()


def test_a_young_lock_may_be_another_hosts(folder, monkeypatch):
    lock = folder / "lock"
    lock.touch()
    done, found = threading.Event(), []
    thread = threading.Thread(target=lambda: (found.append(wait_for_builder()), done.set()))
    thread.start()
    assert not done.wait(0.3)  # it waits
    lock.unlink()
    assert done.wait(30) and found == [None]
    thread.join()
    lock.touch()
    monkeypatch.setattr(build_locks, "STALE_AFTER_S", 0.5)
    assert wait_for_builder() == lock


@pytest.mark.parametrize(("age_s", "built"), [(120, 0), (None, 1)])
def test_ranks_go_on_without_the_op_and_name_the_file(folder, monkeypatch, age_s, built):
    import deepspeed  # noqa: F401

    comm = sys.modules["deepspeed.comm.torch"]
    builds, lines = [], []
    monkeypatch.setattr(comm, "build_shm_op", lambda: builds.append(1))
    monkeypatch.setattr(hook.logger, "warning", lambda message, *args: lines.append(message % args))
    monkeypatch.setenv("WORLD_SIZE", "2")
    hook._patch_shared_memory_op()
    if age_s is not None:
        (folder / "lock").touch()
        age(folder / "lock", age_s)
    comm.build_shm_op()
    assert len(builds) == built
    assert len(lines) == 1 - built and all(str(folder / "lock") in line and "delete the file" in line for line in lines)


@pytest.mark.parametrize(("rank", "says"), [("0", 1), ("1", 0)])
def test_the_first_build_is_said_before_it_begins_and_once(folder, monkeypatch, rank, says):
    import deepspeed

    comm = sys.modules["deepspeed.comm.torch"]
    events = []
    monkeypatch.setattr(comm, "build_shm_op", lambda: events.append("build"))
    monkeypatch.setattr(hook.logger, "info", lambda message, *args: events.append(message % args))
    monkeypatch.setattr(deepspeed.accelerator.get_accelerator(), "device_name", lambda index=None: "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", rank)
    hook._patch_shared_memory_op()
    comm.build_shm_op()
    assert len(events) == says + 1 and events[-1] == "build"
    assert not says or ("minutes, once" in events[0] and str(build_locks.build_root()) in events[0])
    library = folder / f"{build_locks.SHARED_MEMORY_OP}.so"
    library.touch()
    comm.build_shm_op()
    assert events[says + 1 :] == ["build"]
    age(library, 1e9)  # by another torch
    comm.build_shm_op()
    assert len(events[says + 2 :]) == says + 1
