"""Runs a function on several ranks, each a process of its own, and returns what each of them returned.

The processes are forked from a server that has imported torch and holds no threads, so that a test of four ranks takes
a second and not four imports.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lazytrain_plugin.comm.hops import Hops

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed.nn", "torch._dynamo", "lazytrain_plugin.comm.ddp"])


@dataclass
class Failure:
    """What a rank raised, as text, or how its process ended."""

    text: str


def run_ranks(function: Any, world_size: int, *args: Any, device: str = "cpu", timeout_s: float = 90, env=None) -> list:
    """`function(rank, device, *args)` on each rank; a list of results or `Failure`s. `env`: rank -> variables."""
    if device == "cuda" and torch.cuda.device_count() < world_size:
        import pytest

        pytest.skip(f"needs {world_size} CUDA devices")
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            variables = {"GLOO_SOCKET_IFNAME": "lo", **(env(rank) if env else {})}
            arguments = (sender, function, rank, world_size, f"file://{folder}/store", device, variables, args)
            process = _context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            sender.close()
            started.append((process, receiver))
        end = time.monotonic() + timeout_s
        results = []
        for process, receiver in started:
            try:
                ready = receiver.poll(max(0.0, end - time.monotonic()))
                if ready:
                    results.append(torch.load(io.BytesIO(receiver.recv_bytes()), weights_only=False))
                else:
                    results.append(Failure(f"no result within {timeout_s} s"))
            except EOFError:
                process.join(5)
                results.append(Failure(f"ended with exit code {process.exitcode}"))
        for process, _ in started:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        return results


@contextlib.contextmanager
def telling_others(path: Path) -> Iterator[None]:
    """Whatever this rank raises, the others hear that it has."""
    try:
        yield
    except BaseException:
        path.touch()
        raise


def stay_until_told(path: Path) -> None:
    """A rank that is alive and does nothing, until another one has touched `path` (see `telling_others`)."""
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.005)


def wait_in_vain(hops: Hops, seconds: float, *others: dist.ProcessGroup | None) -> None:
    """From now on collectives fail after so long. Only where the other ranks have come to rest: till then a loaded
    machine may take its time."""
    groups = [group for _, group in hops._groups]
    for group in (*groups, *filter(None, others)):
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


def succeed(function: Any, world_size: int, *args: Any, **options: Any) -> list:
    """As `run_ranks`, and no rank may fail."""
    results = run_ranks(function, world_size, *args, **options)
    failures = [f"rank {rank}: {result.text}" for rank, result in enumerate(results) if isinstance(result, Failure)]
    assert not failures, "\n".join(failures)
    return results


def _rank_main(sender, function, rank, world_size, init_method, device, variables, args) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    try:
        if device == "cuda":
            torch.cuda.set_device(where)
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
        if device == "cuda":
            result = function(rank, where, *args)
        else:
            from tests.comm.rules import Rules

            rules = Rules()
            with rules.applied():
                result = function(rank, where, *args)
            rules.compare()
        dist.barrier()
        _send(sender, result)
        dist.destroy_process_group()
    except BaseException:
        _send(sender, Failure(traceback.format_exc()))


def _send(sender, result) -> None:
    # As bytes: tensors sent as they are would share memory with a process that ends before they are read.
    data = io.BytesIO()
    torch.save(result, data)
    sender.send_bytes(data.getvalue())
