import subprocess
import sys

import pytest

CODE = """
import logging, sys
{before}
from lazytrain_plugin.integration.logs import setup_logging
setup_logging(); setup_logging()
{after}
logger = logging.getLogger("lazytrain_plugin.runtime.worker")
logger.info("info")
logger.warning("warning")
"""


def lines(before: str = "", after: str = "", rank: str = "0") -> list[str]:
    process = subprocess.run(
        [sys.executable, "-c", CODE.format(before=before, after=after)],
        capture_output=True,
        text=True,
        check=True,
        env={"RANK": rank},
    )
    return process.stderr.splitlines()


def test_rank_0_tells_everything_and_the_others_only_warn():
    assert lines() == ["[LazyTrain] info", "[LazyTrain] warning"]
    assert lines(rank="1") == ["[LazyTrain] warning"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_script_that_sets_logging_up_sees_every_line_once(when):
    setup = 'logging.basicConfig(format="%(name)s %(message)s")'
    assert [line.rpartition(" ")[2] for line in lines(**{when: setup})] == ["info", "warning"]
