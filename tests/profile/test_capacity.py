"""Memory and cores inside containers: the tightest limit on the way up counts."""

import psutil
import pytest

from lazytrain_plugin.profile.capacity import host_capacity, usable_threads

MIB = 2**20


def machine(root, *, cgroup, files, total_mib=8000, available_mib=6000):
    def write(path, text):
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    write("proc/meminfo", f"MemTotal: {total_mib * 1024} kB\nMemAvailable: {available_mib * 1024} kB\n")
    write("proc/self/cgroup", cgroup)
    for path, text in files.items():
        write(f"sys/fs/cgroup/{path}", text)
    return root


V2 = {
    "memory.stat": "inactive_file 0\n",
    "a/memory.max": f"{4000 * MIB}",
    "a/memory.current": f"{1000 * MIB}",
    "a/memory.stat": f"anon 5\ninactive_file {200 * MIB}\n",
    "a/b/memory.max": "max\n",
    "a/cpu.max": "150000 100000\n",
    "a/b/cpu.max": "max 100000\n",
}
V1 = {
    "memory/a/memory.limit_in_bytes": f"{4000 * MIB}",
    "memory/a/memory.usage_in_bytes": f"{1000 * MIB}",
    "memory/a/memory.stat": f"total_inactive_file {200 * MIB}\n",
    "memory/memory.limit_in_bytes": "9223372036854771712",
    "cpu/a/cpu.cfs_quota_us": "150000",
    "cpu/a/cpu.cfs_period_us": "100000",
}


@pytest.mark.parametrize(("cgroup", "files"), [("0::/a/b\n", V2), ("4:memory:/a\n3:cpu,cpuacct:/a\n", V1)])
def test_cgroup_limits(tmp_path, monkeypatch, cgroup, files):
    root = machine(tmp_path, cgroup=cgroup, files=files)
    own = psutil.Process().memory_info().rss
    capacity = host_capacity(root)
    assert capacity.total_bytes == 4000 * MIB
    # 4000 limit - (1000 used - 200 of reclaimable cache), and what we hold is ours (it moves a little while we look).
    assert capacity.free_bytes == pytest.approx(min(3200 * MIB + own, 4000 * MIB), abs=20 * MIB)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    assert usable_threads(root) == 1


def test_without_limits_memory_is_what_the_kernel_says(tmp_path, monkeypatch):
    root = machine(tmp_path, cgroup="0::/\n", files={"memory.stat": ""})
    own = psutil.Process().memory_info().rss
    capacity = host_capacity(root)
    assert capacity.total_bytes == 8000 * MIB
    assert capacity.free_bytes == pytest.approx(6000 * MIB + own, abs=20 * MIB)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    assert usable_threads(root) == 16


def test_this_machine():
    capacity = host_capacity()
    assert 0 < capacity.free_bytes <= capacity.total_bytes <= psutil.virtual_memory().total
    assert usable_threads() >= 1
