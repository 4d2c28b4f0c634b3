"""Devices, determinism, and the options of the parity matrix."""

import os

# Before deepspeed and transformers are imported: no network, one process, this machine's own device.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Models this small are several times slower on more threads, also in the processes that tests start. Where it is unset,
# Accelerate sets torch's number of threads itself, in a DeepSpeed run but not in a plain one.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

from integration_tests import cases
from integration_tests.harness import process_group

torch.set_num_threads(1)  # where something has imported torch before

DEVICES = ["cuda" if torch.cuda.is_available() else "cpu"]
"""DeepSpeed chooses its accelerator once per process, and takes the GPU where there is one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-matrix", action="store_true", help="every combination of the parity matrix, not a cover")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full-matrix")
        rows = cases.all_cases() if full else cases.pairwise_cases()
        metafunc.parametrize("case", rows, ids=lambda case: case.id)


@pytest.fixture(params=DEVICES, scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device that DeepSpeed takes on this machine."""
    return request.param


@pytest.fixture(autouse=True)
def deterministic():
    """Bit-equality is asserted everywhere here."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def one_process():
    """DeepSpeed wants a process group; this one has a single member."""
    with process_group():
        yield
