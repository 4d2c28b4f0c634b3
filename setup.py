"""Adds the compiled CPU kernels to what pyproject.toml describes (lazytrain_plugin/_build.py does the compiling)."""

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
# By path: importing the package would need the source tree on sys.path, which isolated builds don't have.
_spec = importlib.util.spec_from_file_location("lazytrain_build", ROOT / "lazytrain_plugin" / "_build.py")
kernels_build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kernels_build)


class BuildWithKernels(build_py):
    """Puts the library into the wheel, or into the source tree for an editable install; goes on without a compiler."""

    def run(self):
        super().run()
        package_parent = ROOT if self.editable_mode else Path(self.build_lib)
        output = package_parent / "lazytrain_plugin" / "kernels" / kernels_build.LIBRARY_NAME
        if self.editable_mode and kernels_build.is_current(output):
            return
        try:
            kernels_build.build_library(output)
        except RuntimeError as error:
            print(
                f"{'=' * 100}\nWARNING: lazytrain-plugin is built WITHOUT its C++ CPU kernels: CPU updates are slow.\n"
                f"Install g++ and reinstall, or run: python -m lazytrain_plugin._build\n{error}\n{'=' * 100}",
                file=sys.stderr,
            )


class PlatformWheel(bdist_wheel):
    """py3-none-<platform>: the library links neither Python nor torch."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        return True


setup(distclass=PlatformDistribution, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
