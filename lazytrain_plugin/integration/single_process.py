"""`python train.py` without a launcher: the process group of one that DeepSpeed wants."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping

logger = logging.getLogger(__name__)

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def provide_rendezvous(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Describes a job of one process in the environment, if no launcher has described one; returns whether it did.

    Without it DeepSpeed asks for mpi4py. What a launcher or MPI has set, even in part, is left alone: then a missing
    piece is an error that DeepSpeed reports.
    """
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    if any(name in environment for name in (*LAUNCHER_VARIABLES, *MPI_VARIABLES)):
        return False
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    logger.info("no launcher found: training in this one process")
    return True
