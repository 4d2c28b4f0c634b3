"""`lazytrain doctor`: what this environment would do with a job, found out before the job starts.

Each check is a function that returns findings; `examine` runs them in the order a job would meet the problems.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lazytrain_plugin import _bootstrap
from lazytrain_plugin.config.schema import BLOCK
from lazytrain_plugin.integration.doctor_config import check_config
from lazytrain_plugin.integration.findings import Finding, Status
from lazytrain_plugin.units import format_bytes

DISTRIBUTION = "lazytrain-plugin"
ENTRY_POINT_GROUP = "torch.backends"
AUTOLOAD_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def examine(config_path: Path | None = None, model: str | None = None) -> list[Finding]:
    """All findings about this environment and, if given, a DeepSpeed JSON or an Accelerate launch YAML.

    Args:
        model: a config.json, a model folder or a hub id, which the config's budgets and plan file are compared with.
    """
    findings = [*check_versions(), *check_hook()]
    hook_works = all(finding.status is not Status.ERROR for finding in findings if finding.check == "hook")
    findings += [*check_cpu_kernels(), *check_host(), *check_gpu(), *check_build_locks()]
    if config_path is not None:
        findings += check_config(config_path, hook_works=hook_works, model=model)
    return findings


def check_versions() -> Iterator[Finding]:
    """Installed versions against the ranges of our own package metadata, which are the tested ones."""
    from packaging.requirements import Requirement

    yield Finding("python", Status.OK, f"{sys.version.split()[0]}, {sys.executable}")
    try:
        requires = importlib.metadata.requires(DISTRIBUTION) or []
        yield Finding("lazytrain", Status.OK, importlib.metadata.version(DISTRIBUTION))
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "lazytrain", Status.ERROR, f"{DISTRIBUTION} is not installed", "pip install it; PYTHONPATH won't do"
        )
        return
    for requirement in map(Requirement, requires):
        extra = next((name for name in ("transformers", "gpu") if _has_extra(requirement, name)), None)
        if requirement.marker is not None and extra is None:
            continue
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            missing = "not installed" + {"transformers": " (Trainer needs it)", "gpu": " (speed on a GPU)"}.get(
                extra, ""
            )
            status = Status.ERROR if extra is None else Status.NOTE
            yield Finding(requirement.name, status, missing, f"pip install '{requirement.name}{requirement.specifier}'")
            continue
        if requirement.specifier.contains(installed, prereleases=True):
            yield Finding(requirement.name, Status.OK, installed)
        else:
            yield Finding(
                requirement.name,
                Status.WARNING if extra == "gpu" else Status.ERROR,
                f"{installed} is outside the tested range {requirement.specifier}",
                f"pip install '{requirement.name}{requirement.specifier}'",
            )


def check_hook() -> Iterator[Finding]:
    """Whether `import torch` in this environment makes LazyTrain take over `deepspeed.initialize`."""
    import torch  # noqa: F401  its import runs the entry point, as it does in a training process

    if not _bootstrap.is_installed():
        yield _why_not_installed()
        return
    import deepspeed

    if _bootstrap.failures:
        what, error = next(iter(_bootstrap.failures.items()))
        yield Finding("hook", Status.ERROR, f"{what}: {error}", "install versions in the tested ranges")
    elif getattr(deepspeed.initialize, "_lazytrain_original", None) is None:
        yield Finding(
            "hook", Status.ERROR, "deepspeed.initialize was replaced by another package after us", "remove that package"
        )
    else:
        yield Finding("hook", Status.OK, "active in every process that imports torch")


def _why_not_installed() -> Finding:
    explicit = "start with `lazytrain launch`, or `import lazytrain_plugin.install` in the script"
    switch = os.environ.get(AUTOLOAD_SWITCH, "1")
    names = {point.name for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    if switch != "1":
        detail, remedy = f"{AUTOLOAD_SWITCH}={switch} keeps torch from loading plug-ins", f"unset it, or {explicit}"
    elif "lazytrain" not in names:
        detail = f"no {ENTRY_POINT_GROUP} entry point named lazytrain in this environment"
        remedy = f"install {DISTRIBUTION} into it (a folder on PYTHONPATH has none), or {explicit}"
    elif sys.flags.no_site:
        detail, remedy = "python -S does not see editable installs", f"start without -S, or {explicit}"
    else:
        detail, remedy = "torch did not call our entry point", explicit
    return Finding("hook", Status.ERROR, f'{detail}: a "{BLOCK}" block would be ignored', remedy)


def check_cpu_kernels() -> Iterator[Finding]:
    """Instruction set and threads of the optimizer update on the CPU."""
    from lazytrain_plugin.kernels import native

    info = native.kernel_info()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if info.library is None:
        yield Finding(
            "cpu kernels",
            Status.WARNING,
            "the C++ library is missing; plain torch updates weights several times slower",
            "install g++, then: python -m lazytrain_plugin._build",
        )
    else:
        threads = native.default_num_threads(local_ranks)
        yield Finding("cpu kernels", Status.OK, f"{info.isa}, {threads} threads per rank")
    omp = os.environ.get("OMP_NUM_THREADS")
    if omp is not None:
        yield Finding("OMP_NUM_THREADS", Status.NOTE, f"{omp}: holds for torch's own CPU operators, not for our update")


def check_host() -> Iterator[Finding]:
    """Host memory under the cgroup limit, the page-lock limit and shared memory for DataLoader workers."""
    from lazytrain_plugin.profile.capacity import SHM_REMEDY, host_capacity, small_shared_memory

    capacity = host_capacity()
    yield Finding(
        "host memory",
        Status.OK,
        f"{format_bytes(capacity.free_bytes)} usable of {format_bytes(capacity.total_bytes)} (RAM or cgroup limit)",
    )
    if capacity.pin_limit_bytes is None:
        yield Finding("pinned memory", Status.OK, "no page-lock limit")
    else:
        enough = capacity.pin_limit_bytes >= capacity.free_bytes or not _has_gpu()
        yield Finding(
            "pinned memory",
            Status.OK if enough else Status.WARNING,
            f"page-lock limit {format_bytes(capacity.pin_limit_bytes)}",
            "" if enough else "ulimit -l unlimited (docker: --ulimit memlock=-1); unpinned copies are slower",
        )
    small = small_shared_memory()
    yield Finding(
        "/dev/shm",
        Status.WARNING if small else Status.OK,
        small or "1 GiB or more",
        SHM_REMEDY if small else "",
    )


def check_gpu() -> Iterator[Finding]:
    """The GPUs that torch sees, and whether the fused kernels can be compiled for them."""
    import torch

    if not _has_gpu():
        yield Finding("gpu", Status.NOTE, "none: LazyTrain runs with the CPU as the device")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        bf16 = properties.major >= 8
        yield Finding(
            f"gpu {index}",
            Status.OK if bf16 else Status.WARNING,
            f"{properties.name}, {format_bytes(free_bytes)} free of {format_bytes(total_bytes)}",
            "" if bf16 else "no native bf16 (compute capability below 8.0): training will be slow",
        )
        yield from _check_node(index)
    if importlib.util.find_spec("triton") is None:
        yield Finding(
            "triton", Status.WARNING, "missing: no fused kernels, GPU updates run in plain torch", "pip install triton"
        )


def _check_node(index: int) -> Iterator[Finding]:
    """Where host memory and update threads of a GPU go, on a machine with several NUMA nodes."""
    import torch

    from lazytrain_plugin.profile.numa import count_nodes
    from lazytrain_plugin.runtime.near_device import node_of

    num_nodes = count_nodes()
    if num_nodes == 1:
        return
    node = node_of(torch.device("cuda", index))
    if node is None:
        yield Finding(
            f"numa, gpu {index}",
            Status.WARNING,
            f"{num_nodes} nodes, and not known which one is the GPU's, or this process may not run there",
            "start where the GPU is: numactl --cpunodebind=N (nvidia-smi topo -m shows N)",
        )
    else:
        where = f"node {node.index} of {num_nodes}: host memory and update threads ({len(node.cpus)} processors) there"
        yield Finding(f"numa, gpu {index}", Status.OK, where)


def check_build_locks() -> Iterator[Finding]:
    """Locks of torch extensions that killed builds left: ranks wait on them without a word."""
    from lazytrain_plugin.integration.build_locks import find_locks

    for lock in find_locks():
        yield Finding(
            "build lock",
            Status.WARNING,
            f"{lock}: no process holds it; a build that was killed leaves one, and the next build waits on it for ever",
            f"if nothing is being compiled on another host: rm {shlex.quote(str(lock))}",
        )


def _has_extra(requirement: Any, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
