"""`import lazytrain_plugin.install`: the explicit road in, for when the `torch.backends` entry point does not run.

Import it before the engine is made, anywhere in the script. Raises what made the hook fail, if anything did.
"""

from lazytrain_plugin import _bootstrap

_bootstrap.install()
