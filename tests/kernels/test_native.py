"""The C++ library as a whole: found, dispatched, threaded, or replaced by plain torch with one warning."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lazytrain_plugin import _build
from lazytrain_plugin.errors import KernelError
from lazytrain_plugin.kernels import native
from tests.kernels.adamw_cases import Case, State, assert_same_bits

ROOT = Path(__file__).parents[2]


def test_the_best_instruction_set_of_this_processor_is_used():
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    known = {"avx512vbmi": "avx512vbmi", "avx512bw": "avx512", "avx2": "avx2"}
    best = next((isa for flag, isa in known.items() if flag in flags), "generic")
    info = native.kernel_info()
    assert info.library is not None, "the library is not built: python -m lazytrain_plugin._build"
    assert (info.isa, info.threads) == (best, native.default_num_threads(1))
    assert native.available_isas()[0] == best


def test_unknown_instruction_sets_are_refused():
    with pytest.raises(KernelError, match="avx1024"):
        native.force_isa("avx1024")
    assert native.kernel_info().isa == native.available_isas()[0]


def test_without_the_library_torch_computes_the_same_and_says_so_once(monkeypatch, tmp_path, caplog):
    expected = State(Case(1000, bits=8), torch.device("cpu"), steps=2)
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "missing.so")
    native._loaded.cache_clear()
    try:
        with caplog.at_level("WARNING"):
            states = [State(Case(1000, bits=8), torch.device("cpu"), steps=2) for _ in range(2)]
        assert native.kernel_info().library is None and native.kernel_info().isa == "torch"
    finally:
        monkeypatch.undo()
        native._loaded.cache_clear()
    assert_same_bits(states[0], expected)
    (message,) = [record.getMessage() for record in caplog.records if record.name == native.__name__]
    assert "slower" in message and "python -m lazytrain_plugin._build" in message


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_an_unusable_library_is_not_used(monkeypatch, tmp_path, content):
    broken = tmp_path / "broken.so"
    broken.write_bytes(content)
    monkeypatch.setattr(native, "LIBRARY", broken)
    native._loaded.cache_clear()
    try:
        assert native.kernel_info().library is None
    finally:
        monkeypatch.undo()
        native._loaded.cache_clear()


def test_default_threads_are_the_rank_s_share_whatever_omp_says(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(native, "cgroup_cpu_quota", lambda: None)
    assert [native.default_num_threads(ranks) for ranks in (1, 3, 16, 40)] == [16, 5, 1, 1]
    monkeypatch.setattr(native, "cgroup_cpu_quota", lambda: 6.5)
    assert [native.default_num_threads(ranks) for ranks in (1, 2)] == [6, 3]
    monkeypatch.setattr(native, "cgroup_cpu_quota", lambda: 0.5)
    assert native.default_num_threads(1) == 1


def test_quota_is_the_tightest_of_the_groups(tmp_path):
    groups = tmp_path / "cgroup"
    groups.write_text("0::/user/job\n")
    assert native.cgroup_cpu_quota(tmp_path, groups) is None
    job = tmp_path / "user" / "job"
    job.mkdir(parents=True)
    (job / "cpu.max").write_text("max 100000\n")
    assert native.cgroup_cpu_quota(tmp_path, groups) is None
    (tmp_path / "user" / "cpu.max").write_text("250000 100000\n")
    assert native.cgroup_cpu_quota(tmp_path, groups) == 2.5
    (job / "cpu.max").write_text("400000 100000\n")
    assert native.cgroup_cpu_quota(tmp_path, groups) == 2.5

    groups.write_text("5:memory:/box\n4:cpu,cpuacct:/box\n")  # version 1
    box = tmp_path / "cpu" / "box"
    box.mkdir(parents=True)
    (box / "cpu.cfs_quota_us").write_text("-1")
    (box / "cpu.cfs_period_us").write_text("100000")
    assert native.cgroup_cpu_quota(tmp_path, groups) is None
    (box / "cpu.cfs_quota_us").write_text("150000")
    assert native.cgroup_cpu_quota(tmp_path, groups) == 1.5


def test_the_library_needs_neither_python_nor_torch_nor_libstdcxx():
    import shutil

    if shutil.which("readelf") is None:
        pytest.skip("needs binutils")
    dynamic = subprocess.run(["readelf", "-d", str(native.LIBRARY)], capture_output=True, text=True, check=True).stdout
    needed = [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "NEEDED" in line]
    assert {name.split(".so")[0] for name in needed} <= {"libc", "libm", "ld-linux-x86-64", "libpthread"}


def test_packaging_without_a_compiler_warns_and_goes_on(tmp_path):
    environment = {**os.environ, "PATH": str(tmp_path), "CXX": "no-such-compiler"}
    result = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "lib")],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "WITHOUT its C++ CPU kernels" in result.stderr and "python -m lazytrain_plugin._build" in result.stderr
    assert (tmp_path / "lib" / "lazytrain_plugin" / "kernels" / "native.py").exists()


def test_a_failing_compiler_is_quoted(tmp_path, monkeypatch):
    compiler = tmp_path / "bad-compiler"
    compiler.write_text("#!/bin/sh\necho 'this is broken' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    output = tmp_path / "out" / _build.LIBRARY_NAME
    with pytest.raises(RuntimeError, match="this is broken"):
        _build.build_library(output)
    assert not output.exists() and not _build.is_current(output)
