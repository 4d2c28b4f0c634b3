"""The line that says what was found names the GPU only where there is one."""

import pytest
from torch import nn

from lazytrain_plugin.runtime.discovery import discover


def layered() -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(2)), "head": nn.Linear(2, 2)})


@pytest.mark.parametrize("model", [layered(), nn.Linear(2, 2)], ids=["layers", "no layers"])
@pytest.mark.parametrize("has_gpu", [True, False])
def test_the_gpu_is_named_where_there_is_one(model, has_gpu):
    assert ("GPU" in discover(model).statement(has_gpu=has_gpu)) == has_gpu
