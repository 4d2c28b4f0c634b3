"""Errors that reach a user; each message says what, why and the one-line remedy."""


def first_line(error: BaseException) -> str:
    """What an error of somebody else's code says, in one line; its kind where it says nothing (a bare assert)."""
    lines = str(error).splitlines()
    return lines[0] if lines and lines[0] else type(error).__name__


class LazyTrainError(RuntimeError):
    """Base of every error that LazyTrain raises on purpose."""


class ConfigError(LazyTrainError, ValueError):
    """The "lazytrain" block (or the DeepSpeed JSON around it) can't be honoured."""


class UnsupportedModelError(LazyTrainError):
    """The model does something that a streamed unit can't reproduce exactly."""


class PlanMismatchError(LazyTrainError):
    """A plan file does not describe this model or this machine."""


class InfeasiblePlanError(LazyTrainError):
    """No placement fits the budgets; the message names need and have per tier."""


class CheckpointError(LazyTrainError):
    """A checkpoint is torn, missing or does not belong to this model."""


class KernelError(LazyTrainError):
    """A kernel was asked for something it can't do, or its library is unusable."""


class StorageError(LazyTrainError):
    """A disk that holds a part of training is full, failing, missing, or gave back other bytes than were written."""


class CommunicationError(LazyTrainError):
    """Ranks could not exchange gradients; the message names the phase, this rank and those that are silent."""
