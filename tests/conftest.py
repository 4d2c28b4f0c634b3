"""Shared by the unit tests: the devices there are, and processes that behave the same on every machine."""

import os

# Before anything imports deepspeed or transformers: no network, no look-up of a missing hub, no fork warnings.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Models this small are several times slower on more threads, also in the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

torch.set_num_threads(1)  # where something has imported torch before

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device of this machine: one test, as many runs."""
    return torch.device(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
