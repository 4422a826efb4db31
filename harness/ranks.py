"""Which process this is: its rank, from the variables of the launcher that started it. Nothing else reads these.

Loads nothing heavy: a script asks before Lightning is imported, which reads some of the variables in its own way.
"""

import os
from dataclasses import dataclass, replace

from apprentice.errors import BadInput


@dataclass(frozen=True)
class Variables:
    """A launcher's variables of the environment; "" for what it does not tell."""

    rank: str
    size: str  # number of ranks
    local_rank: str  # the rank's number on its machine
    local_size: str = ""  # number of ranks on a machine
    nodes: str = ""  # number of machines
    needed: tuple[str, ...] = ()  # others, without which Lightning fails


TORCHRUN = Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
# The first launcher that fits counts: mpirun may run inside a SLURM job, and srun sets MPICH's variables too.
LAUNCHERS = {
    "torchrun": replace(TORCHRUN, needed=("LOCAL_RANK",)),  # only with TORCHELASTIC_RUN_ID
    "mpi": Variables(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    "slurm": Variables(
        "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nodes="SLURM_NNODES", needed=("SLURM_LOCALID", "SLURM_NODEID")
    ),
    "mpich": Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "hand": TORCHRUN,
}
# Lightning sets them for the ranks that it starts as sub-processes.
OF_LIGHTNING = "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_PORT"


@dataclass(frozen=True)
class Launch:
    """The place of a process that a launcher started."""

    by: str  # "torchrun", "slurm", "mpi" or "hand"
    rank: int  # of this process
    size: int  # number of ranks
    nodes: int  # number of machines
    variables: Variables

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} ({self.variables.size}={self.size})"


def find_launch() -> Launch | None:
    """Return this process's place if a launcher started it; raise BadInput if the launcher's variables contradict."""
    for by, names in LAUNCHERS.items():
        if not _is_active(by) or not {names.rank, names.size} <= os.environ.keys():
            continue
        rank, size = _number(names.rank), _number(names.size)
        if not 0 <= rank < size:
            raise BadInput("", f"{names.rank} {rank}", f"a number from 0 to {size - 1}, as {names.size} is {size}")
        local_size = max(_number(names.local_size) if names.local_size in os.environ else size, 1)
        nodes = _number(names.nodes) if names.nodes in os.environ else size // local_size
        if size > 1 or by not in {"mpi", "mpich"}:
            return Launch("mpi" if by == "mpich" else by, rank, size, max(nodes, 1), names)
    return None


def _is_active(launcher: str) -> bool:
    if launcher == "slurm":
        return os.environ.get("SLURM_JOB_NAME") not in {"bash", "interactive"}
    return launcher != "torchrun" or "TORCHELASTIC_RUN_ID" in os.environ


def _number(variable: str) -> int:
    value = os.environ[variable]
    if not value.isdecimal():
        raise BadInput("", f"{variable} {value}", "a number")
    return int(value)


def rank() -> int:
    """Return this process's rank; 0 where it is alone."""
    launch = find_launch()
    return int(os.environ.get("LOCAL_RANK", "0")) if launch is None else launch.rank


def is_main_process() -> bool:
    """Return whether this process writes files: it is no rank but the first of a launcher or of Lightning."""
    return rank() == 0


def is_first_of_machine() -> bool:
    """Return whether no other rank of this machine says what all of them find wrong."""
    try:
        launch = find_launch()
    except BadInput:  # which is wrong in this process alone
        return True
    if launch is None and not _is_started_by_lightning():
        return True
    local_rank = os.environ.get(launch.variables.local_rank if launch else "LOCAL_RANK", "0")
    return local_rank == "0" or not local_rank.isdecimal()


def _is_started_by_lightning() -> bool:
    return os.environ.keys() >= {*OF_LIGHTNING}


def check_variables() -> None:
    """Raise BadInput where a process that begins has a rank, but lacks what else its launcher would have set.

    Such variables are left over from another launch: this process would leave the work to a rank 0 that is not there.
    Rank 0 of an unknown number, as in the script of an `sbatch` without `--ntasks`, is alone.
    """
    launch = find_launch()
    if launch is not None:
        names = launch.variables
        _need(names.rank, [name for name in names.needed if name not in os.environ])
        for name in (names.local_rank, *names.needed, "GROUP_RANK"):
            if name in os.environ:
                _number(name)
        return
    for by, names in LAUNCHERS.items():
        if _is_active(by) and os.environ.get(names.rank, "0") != "0" and names.size not in os.environ:
            _need(names.rank, [names.size])
    if "LOCAL_RANK" in os.environ and not _is_started_by_lightning():
        if os.environ["LOCAL_RANK"] != "0":
            _need("LOCAL_RANK", [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ])
        del os.environ["LOCAL_RANK"]  # Lightning would wait for the other ranks


def _need(variable: str, missing: list[str]) -> None:
    if missing:
        others = " and ".join(missing)
        expected = f"{others} beside it, as a launcher sets them; or, for one process, `unset {variable}`"
        raise BadInput("", f"{variable} {os.environ[variable]}", expected)
