"""What errors of other people's code are quoted as."""

import pytest

from lazytrain_plugin.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("a\nb"), "a"), (AssertionError(), "AssertionError"), (RuntimeError("\nb"), "RuntimeError")],
)
def test_an_error_in_one_line(error, line):
    assert first_line(error) == line
