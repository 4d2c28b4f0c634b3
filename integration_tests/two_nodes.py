"""Two "nodes" on one machine: network namespaces joined by a link of limited bandwidth. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
REMEDY = (
    "This test makes network namespaces and must not be skipped: it needs root with CAP_NET_ADMIN and CAP_SYS_ADMIN "
    "and the package iproute2 (docker run --privileged, or --cap-add NET_ADMIN --cap-add SYS_ADMIN)."
)


@dataclass(frozen=True)
class Node:
    namespace: str
    interface: str
    address: str

    def start(self, log: Path, command: list[str], **variables: str) -> subprocess.Popen:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": self.interface, **variables}
        with log.open("w") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *command],
                env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip


def _ip(*arguments: str) -> None:
    try:
        result = subprocess.run(arguments, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise AssertionError(f"{error}. {REMEDY}") from error
    assert result.returncode == 0, f"{' '.join(arguments)}: {result.stderr.strip()}. {REMEDY}"


@contextlib.contextmanager
def two_nodes(mbit: int) -> Iterator[tuple[Node, Node]]:
    """Two namespaces, each with its end of a link that carries `mbit` Mbit/s in each direction.

    Raises AssertionError, with the remedy, where the machine refuses.
    """
    tag = f"{os.getpid() % 100000}"
    nodes = tuple(Node(f"ltnode{i}-{tag}", f"ltv{i}-{tag}", f"10.213.7.{i + 1}") for i in range(2))
    try:
        for node in nodes:
            _ip("ip", "netns", "add", node.namespace)
        _ip(
            "ip", "link", "add", nodes[0].interface, "netns", nodes[0].namespace, "type", "veth",
            "peer", "name", nodes[1].interface, "netns", nodes[1].namespace,
        )  # fmt: skip
        for node in nodes:
            inside = ("ip", "netns", "exec", node.namespace)
            _ip(*inside, "ip", "addr", "add", f"{node.address}/24", "dev", node.interface)
            _ip(*inside, "ip", "link", "set", "lo", "up")
            _ip(*inside, "ip", "link", "set", node.interface, "up")
            shape = ("rate", f"{mbit}mbit", "burst", "128kb", "latency", "100ms")
            _ip(*inside, "tc", "qdisc", "add", "dev", node.interface, "root", "tbf", *shape)
        yield nodes
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "del", node.namespace], capture_output=True)


def run_on_both(
    nodes: tuple[Node, Node], script: Path, arguments: list[str], logs_folder: Path, timeout_s: float
) -> None:
    """torchrun on each node, two ranks each, rendezvous over the link. `INTERFACE` stands for the node's own."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    launch += ["--master-addr", nodes[0].address, "--master-port", "29533"]
    logs = [logs_folder / f"node{rank}.log" for rank in range(len(nodes))]
    processes = [
        node.start(
            logs[rank],
            [*launch, "--node-rank", str(rank), str(script)]
            + [node.interface if argument == "INTERFACE" else argument for argument in arguments],
            OMP_NUM_THREADS="1",
            PYTHONFAULTHANDLER="1",
        )
        for rank, node in enumerate(nodes)
    ]
    end = time.monotonic() + timeout_s
    try:
        while time.monotonic() < end and any(process.poll() is None for process in processes):
            time.sleep(0.2)
            if any(process.poll() for process in processes):  # one node failed: the other gets a moment to say so too
                end = min(end, time.monotonic() + 20)
    finally:
        late = [process for process in processes if process.poll() is None]
        for process in late:
            os.killpg(process.pid, signal.SIGABRT)  # faulthandler shows where each of its threads is
        for process in late:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    failed = [index for index, process in enumerate(processes) if process.wait() != 0]
    logs_text = [log.read_text() for log in logs]
    assert not failed, "\n".join(f"node {index}:\n{logs_text[index][-8000:]}" for index in failed)
