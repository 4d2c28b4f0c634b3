"""The import hook: fresh processes, most with a small stand-in for deepspeed so that they take milliseconds."""

import subprocess
import sys
import textwrap

import pytest

STAND_IN = """
class DeepSpeedEngine: pass
class PipelineModule: pass
class zero:
    class Init: pass
def load_ds_config(config): return config
def initialize(model=None, config=None): return DeepSpeedEngine()
"""


@pytest.fixture
def stand_in(tmp_path):
    """A folder with a package `deepspeed` that has what the hook patches."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text(STAND_IN)
    return tmp_path


def run(code: str, *, cwd=None) -> str:
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=cwd, timeout=120
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_import_torch_installs_the_hook_and_imports_nothing_else():
    out = run(
        """
        import sys, torch
        from lazytrain_plugin import _bootstrap
        ours = sorted(name for name in sys.modules if name.split(".")[0] == "lazytrain_plugin")
        print(_bootstrap.is_installed(), ours, "deepspeed" in sys.modules, _bootstrap.failures)
        """
    )
    assert out == "True ['lazytrain_plugin', 'lazytrain_plugin._bootstrap'] False {}\n"


def test_autoload_takes_less_than_a_millisecond(tmp_path, monkeypatch):
    """CPU time, so that a busy machine does not count, with bytecode as an installed package has it, best of ten."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    code = """
        import threading, time, types, typing, warnings
        start = time.thread_time()
        from lazytrain_plugin import _bootstrap
        _bootstrap.autoload()
        print(time.thread_time() - start)
        """
    run(code)  # compiles
    assert min(float(run(code)) for _ in range(10)) < 1e-3


@pytest.mark.parametrize("first", ["deepspeed", "torch"])
def test_real_deepspeed_is_patched_whatever_is_imported_first(first):
    out = run(
        f"""
        import {first}
        import torch, deepspeed
        from deepspeed import initialize
        print(hasattr(initialize, "_lazytrain_original"), "__new__" in vars(deepspeed.zero.Init), type(deepspeed))
        """
    )
    assert out.splitlines()[-1] == "True True <class 'module'>"


def test_a_probe_does_not_spend_the_hook(stand_in):
    out = run(
        """
        import importlib.util, sys
        from lazytrain_plugin import _bootstrap
        _bootstrap.install(); _bootstrap.install()
        specs = [importlib.util.find_spec("deepspeed") for _ in range(3)]
        print("deepspeed" in sys.modules, specs[0].origin.endswith("deepspeed/__init__.py"))
        import deepspeed
        print(hasattr(deepspeed.initialize, "_lazytrain_original"), type(deepspeed.__spec__.loader).__name__)
        print(sys.meta_path.count(_bootstrap._finder))
        """,
        cwd=stand_in,
    )
    assert out.split("\n")[:3] == ["False True", "True SourceFileLoader", "1"]


def test_a_finder_that_asks_importlib_again_does_not_recurse(stand_in):
    out = run(
        """
        import importlib.util, sys
        from lazytrain_plugin import _bootstrap

        class Nosy:
            busy = False
            def find_spec(self, name, path=None, target=None):
                if name == "deepspeed" and not Nosy.busy:
                    Nosy.busy = True
                    try:
                        return importlib.util.find_spec(name)
                    finally:
                        Nosy.busy = False

        sys.meta_path.insert(0, Nosy())
        _bootstrap.install()
        import deepspeed
        print(hasattr(deepspeed.initialize, "_lazytrain_original"))
        """,
        cwd=stand_in,
    )
    assert out == "True\n"


def test_reload_and_a_failed_first_import_are_patched(stand_in):
    out = run(
        """
        import importlib, pathlib, sys
        from lazytrain_plugin import _bootstrap
        _bootstrap.install()
        path = pathlib.Path("deepspeed/__init__.py")
        good = path.read_text()
        path.write_text("raise OSError('no driver')")
        try:
            import deepspeed
        except OSError as error:
            print(error)
        path.write_text(good + "# another size, so that the bytecode is stale")
        import deepspeed
        print(hasattr(deepspeed.initialize, "_lazytrain_original"))
        importlib.reload(deepspeed)
        print(hasattr(deepspeed.initialize, "_lazytrain_original"), _bootstrap.failures)
        """,
        cwd=stand_in,
    )
    assert out.split("\n")[:3] == ["no driver", "True", "True {}"]


def test_a_module_in_the_middle_of_its_import_is_patched_at_its_first_use(stand_in):
    """What happens when deepspeed is imported before torch, as its first lines import torch."""
    path = stand_in / "deepspeed" / "__init__.py"
    path.write_text("from lazytrain_plugin import _bootstrap; _bootstrap.install(); early = 1\n" + STAND_IN)
    out = run(
        """
        from deepspeed import initialize
        import deepspeed
        print(hasattr(initialize, "_lazytrain_original"), deepspeed.early, type(deepspeed).__name__)
        """,
        cwd=stand_in,
    )
    assert out == "True 1 module\n"


def test_a_broken_hook_warns_and_never_raises(stand_in):
    out = run(
        """
        import sys, warnings
        warnings.simplefilter("always")
        from lazytrain_plugin import _bootstrap
        sys.modules["lazytrain_plugin.integration.hook"] = None
        _bootstrap.autoload()
        with warnings.catch_warnings(record=True) as caught:
            import deepspeed
        print(len(caught), "plain DeepSpeed would run" in str(caught[0].message), *_bootstrap.failures)
        del sys.modules["lazytrain_plugin.integration.hook"]
        print(isinstance(deepspeed.initialize(), deepspeed.DeepSpeedEngine))
        """,
        cwd=stand_in,
    )
    assert out == "1 True deepspeed\nTrue\n"


def test_explicit_install_raises_what_autoload_only_reports(stand_in):
    (stand_in / "deepspeed" / "__init__.py").write_text(STAND_IN.replace("DeepSpeedEngine()", "object()"))
    out = run(
        """
        import deepspeed
        try:
            import lazytrain_plugin.install
        except RuntimeError as error:
            print(error)
        """,
        cwd=stand_in,
    )
    assert "no longer makes its engine from the global DeepSpeedEngine" in out
