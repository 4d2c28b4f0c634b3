"""Lets the update threads finish before the interpreter goes.

A script that ends without `engine.destroy()` leaves the updates of its last step running. Python ends a daemon thread
by unwinding it where it next asks for the interpreter's lock; inside torch that is C++, and the process aborts
("terminate called without an active exception") with its work already done.
"""

from __future__ import annotations

import atexit
import weakref

from lazytrain_plugin.runtime.worker import UpdateWorker

_workers: weakref.WeakSet[UpdateWorker] = weakref.WeakSet()


def finish_at_exit(*workers: UpdateWorker) -> None:
    """The process waits for what they still have to do; nothing happens for one that was closed before."""
    _workers.update(workers)


@atexit.register
def _finish_all() -> None:
    for worker in list(_workers):
        worker.close()
