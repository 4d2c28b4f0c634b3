import subprocess
import sys

import pytest

import lazytrain_plugin


def test_every_public_name_resolves():
    for name in lazytrain_plugin.__all__:
        assert getattr(lazytrain_plugin, name).__name__ == name
    assert set(lazytrain_plugin.__all__) <= set(dir(lazytrain_plugin))
    with pytest.raises(AttributeError, match="LazyTrane"):
        lazytrain_plugin.LazyTrane  # noqa: B018


def test_importing_the_package_imports_nothing():
    code = "import sys, typing; before = set(sys.modules); import lazytrain_plugin; print(*set(sys.modules) - before)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["lazytrain_plugin"]
