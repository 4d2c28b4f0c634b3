"""Fixtures of the kernel tests."""

import pytest

from lazytrain_plugin.kernels import native
from tests.kernels.implementations import IMPLEMENTATIONS


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    """Every implementation; the test selects it with `use`."""
    yield request.param
    native.force_isa(None)


@pytest.fixture(params=[name for name in IMPLEMENTATIONS if name != native.PLAIN_TORCH])
def kernel(request):
    """As `implementation`, without plain torch, the reference."""
    yield request.param
    native.force_isa(None)


@pytest.fixture(params=[name for name in native.available_isas() if name != native.PLAIN_TORCH])
def isa(request):
    """The instruction sets of the C++ library, selected."""
    native.force_isa(request.param)
    yield request.param
    native.force_isa(None)


@pytest.fixture
def threads():
    """Sets the number of threads until the test ends."""
    yield native.set_num_threads
    native.set_num_threads(native.default_num_threads(1))
