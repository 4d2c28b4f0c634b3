"""LazyTrain: a DeepSpeed offload engine that plans every tensor's place.

Importing this package imports nothing else (the `torch.backends` entry point imports it in
every process that imports torch), so public names are resolved on first use.
"""

__version__ = "0.1.0"
