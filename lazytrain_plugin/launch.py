"""`python -m lazytrain_plugin.launch train.py ...`: runs an unchanged script with LazyTrain's hook installed.

The explicit road for launchers: `accelerate launch --config_file FILE -m lazytrain_plugin.launch train.py ...`.
A module is run with `python -m lazytrain_plugin.launch -m package.module ...`.
"""

from __future__ import annotations

import os
import runpy
import sys

from lazytrain_plugin import _bootstrap

USAGE = "usage: python -m lazytrain_plugin.launch [-m] SCRIPT_OR_MODULE [ARGUMENTS ...]"


def main(argv: list[str]) -> None:
    """Runs the script or module in `argv` as `__main__`, with `sys.argv` and `sys.path[0]` as Python sets them."""
    is_module = argv[:1] == ["-m"]
    target, arguments = argv[is_module : is_module + 1], argv[is_module + 1 :]
    if not target or (target[0].startswith("-") and not is_module):
        raise SystemExit(USAGE)
    _bootstrap.install()
    sys.argv = [target[0], *arguments]
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    else:
        if not os.path.isfile(target[0]):
            raise SystemExit(f"{USAGE}\nno such file: {target[0]}")
        sys.path[0] = os.path.dirname(os.path.abspath(target[0]))
        runpy.run_path(target[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
