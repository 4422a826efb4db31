"""A stand-in for SLURM on one machine: `install` makes its commands, which keep a job's state in files.

A job's processes are the children of its script; a job without processes that has not ended by itself was lost.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = ("sbatch", "srun", "sacct", "scancel", "scontrol")
STATE = "SLURM_STAND_IN"  # the folder of jobs, in the environment


def install(folder: Path) -> dict[str, str]:
    """Write the commands into a folder; returns the environment in which they are SLURM."""
    (folder / "jobs").mkdir(parents=True)
    for name in COMMANDS:
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S -E {shlex.quote(__file__)} {name} "$@"\n')
        path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", STATE: str(folder / "jobs")}


def submitted(folder: Path) -> list[str]:
    """What was asked of SLURM, a line a command."""
    return (folder / "jobs" / "story").read_text().splitlines()


def tree(pid: int) -> list[int]:
    """A process and what it has started, alive."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents.setdefault(int(parent), []).append(int(path.parent.name))
    alive, queue = [], [pid] if Path(f"/proc/{pid}").exists() else []
    while queue:
        alive.append(queue.pop())
        queue += parents.get(alive[-1], [])
    return alive


def send(jobs: Path, job: str, number: int) -> None:
    """Signal all processes of a job."""
    for pid in tree(int((jobs / f"{job}.pid").read_text())):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def begin(jobs: Path, job: str) -> None:
    """Run a job's script, apart from what asks for it; its exit code remains."""
    given = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "1"}
    (jobs / f"{job}.code").unlink(missing_ok=True)
    words = ["/bin/sh", "-c", f"bash {jobs}/{job}.sh; code=$?; [ $code -ge 128 ] || echo $code > {jobs}/{job}.code"]
    process = subprocess.Popen(
        words, env={**os.environ, **given}, start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    (jobs / f"{job}.pid").write_text(str(process.pid))


def sbatch(jobs: Path, script: str) -> None:
    job = str(1000 + len([*jobs.glob("*.sh")]))
    (jobs / f"{job}.sh").write_text(Path(script).read_text())
    begin(jobs, job)
    print(f"Submitted batch job {job}")


def srun(_jobs: Path, *words: str) -> None:
    """Start the one task; its rank is in the environment, its output in files."""
    command = list(words)
    while command[0].startswith("-"):
        option = command.pop(0)
        if option in {"--output", "--error"}:
            path = command.pop(0).replace("%j", os.environ["SLURM_JOB_ID"]).replace("%t", "0")
            os.dup2(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY), 1 if option == "--output" else 2)
    os.environ.update(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")
    os.execvp(command[0], command)


def sacct(jobs: Path, *words: str) -> None:
    print("JobID|State|NodeList")
    for job in re.findall(r"-j (\d+)", " ".join(words)):
        code = jobs / f"{job}.code"
        alive = tree(int((jobs / f"{job}.pid").read_text()))
        ended = "CANCELLED by 0" if (jobs / f"{job}.cancelled").exists() else "NODE_FAIL"
        state = (
            "REQUEUED"
            if (jobs / f"{job}.requeued").exists()
            else "RUNNING"
            if alive
            else ended
            if not code.exists()
            else "COMPLETED"
            if code.read_text() == "0\n"
            else "FAILED"
        )
        print(f"{job}|{state}|n1")


def scancel(jobs: Path, job: str) -> None:
    (jobs / f"{job}.cancelled").touch()
    send(jobs, job, signal.SIGTERM)


def scontrol(jobs: Path, requeue: str, job: str) -> None:
    """End a job, whose processes may save first, and begin it again."""
    assert requeue == "requeue"
    (jobs / f"{job}.requeued").touch()
    if os.fork() == 0:
        os.setsid()
        while tree(int((jobs / f"{job}.pid").read_text())):
            time.sleep(0.1)
        begin(jobs, job)
        (jobs / f"{job}.requeued").unlink()


if __name__ == "__main__":
    folder = Path(os.environ[STATE])
    name, *arguments = sys.argv[1:]
    if name != "sacct":
        with (folder / "story").open("a") as file:
            file.write(f"{name} {' '.join(arguments)}\n")
    {"sbatch": sbatch, "srun": srun, "sacct": sacct, "scancel": scancel, "scontrol": scontrol}[name](folder, *arguments)
