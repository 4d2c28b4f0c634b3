"""Entry point of group `torch.backends`: torch calls `autoload` at the end of every `import torch`.

It runs in every process of the environment that imports torch, so it takes well under a millisecond, imports only the
standard library, and never raises (an exception here would break `import torch` itself). All it does is to watch for
the modules that LazyTrain patches; `lazytrain_plugin.integration` is imported when one of them was executed.

[Note: why the finder stays installed]
Accelerate and transformers probe `importlib.util.find_spec("deepspeed")` without importing it. A finder that removes
itself after its first `find_spec` would be spent on the probe, and the patch would never land. So ours stays, and it is
the wrapped loader's `exec_module` that tells that a module really ran.

[Note: deepspeed imported before torch]
`import deepspeed` in a fresh process imports torch in its first lines: when `autoload` runs, deepspeed is already in
`sys.modules` but has no `initialize` yet, and its loader can't be wrapped any more. Such a module gets a class whose
first attribute access after the import has finished applies the patch.
"""

from __future__ import annotations

import sys
import threading
import warnings
from types import ModuleType
from typing import Any

TARGETS = ("deepspeed", "transformers.integrations.deepspeed", "transformers.trainer_callback")
"""Modules that are patched right after they were executed."""

failures: dict[str, BaseException] = {}
"""Module name, or "autoload", to what went wrong; `lazytrain doctor` reports it."""


def autoload() -> None:
    """Installs the import hook; the failure, if any, is kept in `failures` and told in a warning."""
    try:
        install()
    except Exception as error:
        _report("autoload", error)


def install() -> None:
    """Watches for the target modules and patches those that are loaded. Safe to call more than once."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    for name in TARGETS:
        module = sys.modules.get(name)
        if module is None:
            continue
        if _is_initializing(module):
            _patch_on_first_use(module)
        else:
            _patch(module)


def is_installed() -> bool:
    """True if the import hook is active in this process."""
    return _finder in sys.meta_path


def _patch(module: ModuleType) -> None:
    from lazytrain_plugin.integration import hook

    hook.patch_module(module)


def _patch_or_report(module: ModuleType) -> None:
    try:
        _patch(module)
    except Exception as error:
        _report(module.__name__, error)


def _report(what: str, error: BaseException) -> None:
    failures[what] = error
    warnings.warn(
        f'LazyTrain could not hook into {what} ({error!r}): a "lazytrain" block would be ignored and plain DeepSpeed '
        "would run. `lazytrain doctor` says more.",
        RuntimeWarning,
        stacklevel=3,
    )


class _Finder:
    """Meta-path finder that finds nothing itself: it wraps the loader that the other finders give a target."""

    def __init__(self) -> None:
        self._searching = threading.local()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in TARGETS or getattr(self._searching, "active", False):
            return None
        self._searching.active = True
        try:
            for finder in sys.meta_path:
                find_spec = getattr(finder, "find_spec", None)
                if finder is self or find_spec is None:
                    continue
                spec = find_spec(fullname, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _Loader(spec.loader)
                    return spec
        finally:
            self._searching.active = False
        return None


class _Loader:
    """The real loader, plus a patch after `exec_module`."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Whoever inspects the module later (inspect, pkgutil, importlib.resources) sees its real loader.
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _patch_or_report(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _patch_on_first_use(module: ModuleType) -> None:
    """See [Note: deepspeed imported before torch]."""
    plain_class = type(module)
    if getattr(plain_class, "_lazytrain_waits", False):
        return
    spec = module.__spec__

    class _PatchedOnFirstUse(plain_class):
        _lazytrain_waits = True

        def __getattribute__(self, name: str) -> Any:
            if not spec._initializing:
                self.__class__ = plain_class
                _patch_or_report(self)
                return getattr(self, name)
            return super().__getattribute__(name)

    module.__class__ = _PatchedOnFirstUse


_finder = _Finder()
