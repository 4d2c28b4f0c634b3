"""A run's folder: ours alone, gone afterwards. Left-overs of dead runs go, a live run's and other files stay."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lazytrain_plugin.errors import ConfigError
from lazytrain_plugin.runtime.nvme.folder import RunFolder
from lazytrain_plugin.runtime.nvme.tier import NvmeTier

OTHER_RUN = """
import sys
from lazytrain_plugin.runtime.nvme.folder import RunFolder
folder = RunFolder(sys.argv[1])
folder.create(8192, direct=True, what="thing")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start_run(disk):
    """Starts another process with a run folder in `disk`."""
    started = []

    def start() -> tuple[subprocess.Popen, Path]:
        command = [sys.executable, "-c", OTHER_RUN, str(disk)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process, Path(process.stdout.readline().strip())

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_killed_runs_folder_is_removed_by_the_next(disk, start_run, caplog):
    process, left_behind = start_run()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (left_behind / "00000.bin").exists()
    with caplog.at_level(logging.INFO):
        folder = RunFolder(disk)
    assert not left_behind.exists() and folder.path.exists()
    lines = [record.getMessage() for record in caplog.records if "left behind" in record.getMessage()]
    assert len(lines) == 1 and left_behind.name in lines[0] and "KiB)" in lines[0]
    folder.close()
    assert not list(disk.iterdir())


def test_a_live_runs_folder_stays(disk, start_run):
    process, alive = start_run()
    RunFolder(disk).close()
    assert (alive / "00000.bin").exists()
    process.communicate(input="")  # and goes when that run ends, here without closing anything
    assert not alive.exists()


def test_a_reused_process_id_does_not_keep_a_dead_runs_folder(disk, start_run):
    process, left_behind = start_run()
    process.kill()
    process.wait()
    owner = json.loads((left_behind / "owner").read_text())
    (left_behind / "owner").write_text(
        json.dumps(owner | {"pid": os.getpid()})
    )  # this process, started at another time
    RunFolder(disk).close()
    assert not left_behind.exists()


@pytest.mark.parametrize("owner", [None, "", "{}", "not json", json.dumps({"what": "another program"}), "[]"])
def test_what_is_not_ours_is_never_touched(disk, owner):
    looks_like_ours = disk / "lazytrain-run-1-deadbeef"
    looks_like_ours.mkdir()
    (looks_like_ours / "00000.bin").write_text("precious")
    if owner is not None:
        (looks_like_ours / "owner").write_text(owner)
    (disk / "lazytrain-results").mkdir()
    (disk / "notes.txt").write_text("precious")
    RunFolder(disk).close()
    assert (looks_like_ours / "00000.bin").read_text() == "precious"
    assert sorted(path.name for path in disk.iterdir()) == ["lazytrain-results", looks_like_ours.name, "notes.txt"]


def test_a_symlink_to_elsewhere_is_not_followed(disk, tmp_path, start_run):
    process, left_behind = start_run()
    process.kill()
    process.wait()
    elsewhere = tmp_path / left_behind.name
    left_behind.rename(elsewhere)
    left_behind.symlink_to(elsewhere)
    RunFolder(disk).close()
    assert (elsewhere / "00000.bin").exists()


def test_a_file_that_somebody_put_into_our_folder_stays(disk, caplog):
    folder = RunFolder(disk)
    (folder.path / "mine.txt").write_text("precious")
    folder.close()
    assert (folder.path / "mine.txt").read_text() == "precious"
    assert any("mine.txt" in record.getMessage() for record in caplog.records)


def test_two_runs_of_one_process_do_not_disturb_each_other(disk):
    first, second = RunFolder(disk), RunFolder(disk)
    first.create(4096, direct=True, what="thing")
    second.close()
    assert (first.path / "00000.bin").exists()
    first.close()


def test_a_forked_child_leaves_its_parents_folder_alone(disk):
    folder = RunFolder(disk)
    child = os.fork()
    if child == 0:
        folder._finalizer()
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.path.exists()
    folder.close()


@pytest.mark.parametrize("kind", ["missing", "file", "read-only"])
def test_an_unusable_folder_is_refused_by_name(disk, kind, monkeypatch):
    path = disk / "there"
    if kind == "file":
        path.write_text("")
    elif kind == "read-only":
        path.mkdir()
        monkeypatch.setattr(os, "access", lambda *args, **kwargs: False)  # root may write anywhere
    with pytest.raises(
        ConfigError, match={"missing": "does not exist", "file": "is a file"}.get(kind, "not writable")
    ) as e:
        NvmeTier([disk, path])
    assert str(path if kind != "read-only" else disk) in str(e.value)
