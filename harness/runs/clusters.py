"""Lightning's cluster environments for ranks that the user starts by hand and for MPI."""

import os
import socket
from functools import lru_cache

from lightning.pytorch.plugins.environments import MPIEnvironment, TorchElasticEnvironment

from apprentice import extras
from apprentice.errors import BadInput

INSTALL = extras.install("mpi")


class ByHand(TorchElasticEnvironment):
    """Torchrun's variables, set by the user, who may leave out those that follow from RANK and WORLD_SIZE.

    Attributes:
        guesses: whether LOCAL_RANK is not given, so that it follows from `local_size`, the ranks on each machine.
    """

    def __init__(self, local_size: int) -> None:
        super().__init__()
        self._local_size, self.guesses = local_size, "LOCAL_RANK" not in os.environ

    def local_rank(self) -> int:
        """The rank's number on its machine."""
        return int(os.environ.get("LOCAL_RANK", self.global_rank() % self._local_size))

    def node_rank(self) -> int:
        """The machine's number."""
        return int(os.environ.get("GROUP_RANK", self.global_rank() // self._local_size))


@lru_cache(1)
def mpi(size: int) -> "MPI":
    """The environment under `mpirun -n SIZE`; MPI can be asked only once.

    Raises:
        BadInput: mpi4py or an MPI library is missing.
    """
    try:
        return MPI()
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library for it
        why = "which is not there" if isinstance(error, ModuleNotFoundError) else f"and a library for it ({error})"
        raise BadInput("", f"mpirun -n {size}", f"mpi4py, {why}; the extra [mpi] brings it: {INSTALL}") from None


class MPI(MPIEnvironment):
    """Asks MPI for the ranks and an address, then finalises MPI; gloo or NCCL sends the tensors.

    With MPI still active a failing rank would wait in MPI_Finalize for the others, and no process could fork.
    """

    def __init__(self) -> None:
        from mpi4py import MPI as mpi  # noqa: N811

        super().__init__()
        hosts = mpi.COMM_WORLD.allgather(socket.gethostname())
        self._main_address = hosts[0] if len(set(hosts)) > 1 else "127.0.0.1"  # needs no name resolution
        self.listening: socket.socket | None = None
        if self.global_rank() == 0:
            self.listening = socket.socket()
            self.listening.listen(4096)  # at a free port, held from now on
        self._main_port = mpi.COMM_WORLD.bcast(self.listening.getsockname()[1] if self.listening else None)
        self.world_size(), self.local_rank(), self.node_rank()  # cached by Lightning's class
        mpi.Finalize()
