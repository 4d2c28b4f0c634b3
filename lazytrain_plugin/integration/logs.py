"""What LazyTrain says while it runs: one logger, readable from the first line, once per job."""

from __future__ import annotations

import logging
import os

ROOT_LOGGER = "lazytrain_plugin"


def setup_logging() -> None:
    """Shows INFO lines of LazyTrain on rank 0, and warnings on every rank, unless the user has set the logger up.

    Every module logs to `logging.getLogger(__name__)`, a child of this one.
    """
    logger = logging.getLogger(ROOT_LOGGER)
    if logger.handlers or logger.level != logging.NOTSET:
        return
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    if logging.getLogger().handlers:
        return  # the script has set logging up: its handlers print our lines, in its format
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[LazyTrain] %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False  # handlers that the script adds later would print every line a second time
