"""One experiment, started by anything: by launchers or by hand, met at an address or in a file; and what can't be."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from apprentice import extras
from experiments import export, gpt, hardware, kd, predict
from harness import ranks as ranks_of
from harness import start
from harness.jobs import command
from harness.runs import launch as launches
from harness.runs import session
from harness.runs.trainer import with_launcher
from strategies.base import rendezvous
from tests.commands import Refusal
from tests.launching import ROOT, TINY, Command, by_hand, ended, free_port, ranks, weights
from tests.processes import Run
from tests.ranks import ranks as process_group

EXACT = [*TINY, "--exact", "2"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process gives."""
    out = tmp_path_factory.mktemp("alone") / "run"
    ended([Run(kd.main, [*EXACT, "--out", str(out)], log=out.with_suffix(".log"))])
    return weights(out)


# Launchers


@pytest.mark.slow
def test_the_old_launch_module(alone: dict[str, bytes], tmp_path: Path) -> None:
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.launch", "--nproc_per_node", "1"]
    port = ["--master_port", str(free_port())]
    run = Command(*launch, *port, ROOT / "experiments" / "kd.py", *EXACT, "--out", "run", log=tmp_path / "log")
    assert run.wait() == 0, run.output
    assert weights(tmp_path / "run") == alone


def slurm(rank: int, size: int = 2, **variables: Any) -> dict[str, Any]:
    """What srun sets for `srun -n 2` on two nodes."""
    given = {"SLURM_NTASKS": size, "SLURM_PROCID": rank, "SLURM_LOCALID": 0, "SLURM_NODEID": rank}
    given |= {"SLURM_NNODES": size, "SLURM_JOB_ID": "1234567", "SLURM_JOB_NAME": "kd", "SLURM_NODELIST": "n[1-2]"}
    return given | variables


def place() -> tuple[str, int, int, int] | None:
    launch = launches.find_launch()
    return launch and (launch.by, launch.rank, launch.size, launch.nodes)


def test_slurms_variables_give_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(variable)
    for key, value in slurm(1).items():
        monkeypatch.setenv(key, str(value))
    assert place() == ("slurm", 1, 2, 2)
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    assert launches.find_launch() is None


def test_one_launcher_inside_another_is_the_one_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    mpirun = {"OMPI_COMM_WORLD_RANK": 1, "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_SIZE": 2}
    mpich = {"PMI_RANK": 0, "PMI_SIZE": 1}
    for key, value in (slurm(0) | mpirun | mpich).items():
        monkeypatch.setenv(key, str(value))
    assert place() == ("mpi", 1, 2, 1)
    assert not launches.is_main_process()
    for key in (*mpirun, *slurm(0)):
        monkeypatch.delenv(key)
    assert launches.find_launch() is None


def test_a_rank_by_hand_knows_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.1"}.items():
        monkeypatch.setenv(key, value)
    settings = with_launcher({"plugins": [], "num_nodes": 2, "devices": "auto"})
    (place,) = settings["plugins"]
    assert (settings["num_nodes"], settings["devices"], place.node_rank(), place.local_rank()) == (2, 2, 1, 1)


def stand_in(folder: Path, srun: str, scontrol: str) -> dict[str, str]:
    """The environment in which these scripts are SLURM's commands."""
    for name, text in {"srun": srun, "scontrol": scontrol}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


SRUN = """printf '%s\\n' "$MASTER_ADDR" "$MASTER_PORT" "$@" > told"""


def test_the_script_for_slurm(alone: dict[str, bytes], tmp_path: Path) -> None:
    given = stand_in(tmp_path, SRUN, "[ $3 = 'n[1-2]' ] && printf 'n1\\nn2\\n'")
    given |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "1234567"}
    assert Command("bash", ROOT / "docs" / "slurm.sbatch", *EXACT, log=tmp_path / "log", **given).wait() == 0
    address, port, option, python, script, *argv = (tmp_path / "told").read_text().splitlines()
    assert (address, port, option, python, script) == (
        "n1", str(15000 + 1234567 % 15000), "--kill-on-bad-exit=1", "python", "experiments/kd.py",
    )  # fmt: skip
    assert argv == ["--out", "runs/kd/slurm-1234567", *EXACT]
    argv[1] = str(tmp_path / "run")
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ended(ranks([slurm(rank, **given) for rank in range(2)], argv, tmp_path / "ranks"))
    assert weights(tmp_path / "run") == alone


def test_a_requeued_job_for_slurm_goes_on(tmp_path: Path) -> None:
    given = stand_in(tmp_path, SRUN, "echo n1") | {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": "7"}
    (tmp_path / "runs" / "kd" / "slurm-7").mkdir(parents=True)
    (tmp_path / "runs" / "kd" / "slurm-7" / "config.yaml").touch()
    for more, out in (({}, "runs/kd/slurm-7"), ({"OUT": "runs/other"}, "runs/other")):
        assert Command("bash", ROOT / "docs" / "slurm.sbatch", log=tmp_path / "log", **given, **more).wait() == 0
        assert (tmp_path / "told").read_text().splitlines()[-4:] == ["--out", out, "--resume", "true"]


def is_free(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) != 0


EACH_NODE = """shift
export SLURM_NTASKS=2
SLURM_PROCID=0 SLURM_NODEID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_NODEID=1 "$@" & second=$!
wait $first && wait $second"""


@pytest.mark.slow
def test_the_script_for_slurm_that_starts_torchrun(alone: dict[str, bytes], tmp_path: Path) -> None:
    given = stand_in(tmp_path, EACH_NODE, "printf '127.0.0.1\\nn2\\n'")
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    job = next(number for number in range(os.getpid() % 10000, 15000) if is_free(15000 + number))
    given |= {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", "OUT": str(tmp_path / "run")}
    given |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": str(job), "SLURM_NNODES": "2", "SLURM_LOCALID": "0"}
    given |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_NAME": "kd"}
    run = Command("bash", ROOT / "docs" / "slurm_torchrun.sbatch", *EXACT, log=tmp_path / "log", **given)
    assert run.wait() == 0, run.output
    assert weights(tmp_path / "run") == alone


@pytest.fixture
def mpi() -> str:
    """A folder with mpi4py, or "" where it is installed."""
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun: Debian's openmpi-bin has it")
    folder = os.environ.get("APPRENTICE_MPI4PY", "")
    env = os.environ | {"PYTHONPATH": folder}
    if subprocess.run(
        [sys.executable, "-c", "import mpi4py.MPI"], env=env, check=False, capture_output=True
    ).returncode:
        pytest.skip("there is no mpi4py: the extra [mpi] brings it, or APPRENTICE_MPI4PY names a folder with it")
    return folder


@pytest.mark.slow
def test_mpirun(mpi: str, alone: dict[str, bytes], tmp_path: Path) -> None:
    start = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
    path = os.pathsep.join(filter(None, [str(ROOT), mpi]))
    run = Command(*start, ROOT / "experiments" / "kd.py", *EXACT, log=tmp_path / "log", PYTHONPATH=path)
    assert run.wait() == 0, run.output
    (out,) = (tmp_path / "runs" / "kd").iterdir()
    assert weights(out) == alone


def test_mpirun_without_mpi4py_names_the_extra(tmp_path: Path) -> None:
    def hidden(rank: int) -> None:
        sys.modules["mpi4py"] = None  # type: ignore[assignment]

    given = [{"OMPI_COMM_WORLD_RANK": r, "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_RANK": r} for r in range(2)]
    runs = ranks(given, [*TINY, "--out", tmp_path / "run"], tmp_path / "log", hidden)
    assert [run.wait() for run in runs] == [2, 2]
    (line,) = "".join(run.said for run in runs).splitlines()  # one of the machine's ranks tells
    assert line.startswith("error: mpirun -n 2: expected mpi4py")
    assert "the extra [mpi]" in line
    assert extras.install_command("mpi") in line


@pytest.mark.parametrize("given", [["--local-rank", "1"], ["--local_rank", "1"], ["--local_rank=1"]])
def test_the_rank_that_the_old_launch_module_gives_is_ignored(given: list[str]) -> None:
    assert vars(kd.parser().parse(given)) == vars(kd.parser().parse([]))


def first_by_turns(folder: Path) -> None:
    for turn in range(2):
        with launches.main_first("task"):
            file = folder / str(turn)
            if dist.get_rank():
                assert file.exists()
            else:
                time.sleep(0.2)
                file.touch()


def test_rank_zero_goes_first_each_time(tmp_path: Path) -> None:
    process_group(2, first_by_turns, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@pytest.mark.parametrize(("devices", "says"), [("8", True), ("2", False), ("auto", False)])
def test_more_processes_than_cores_are_announced(
    devices: str, says: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "cores", lambda: 2)
    session.Session("kd", kd.parser(), [*TINY, "--trainer.devices", devices]).announce()
    line = "--trainer.devices 8: 8 processes share 2 cores, so each fit takes longer than with --trainer.devices 2"
    assert capsys.readouterr().out.splitlines()[1:] == [line] * says


# Where ranks meet

MEET = ["--trainer.strategy", "ddp", "--trainer.strategy.timeout", "2", "--trainer.strategy.init_method"]


def test_ranks_meet_at_an_address_and_in_a_file_that_a_dead_run_has_left(
    alone: dict[str, bytes], tmp_path: Path
) -> None:
    file = tmp_path / "meeting"
    late = [*TINY, *MEET, f"file://{file}", "--out", tmp_path / "stale"]
    stale = ranks(by_hand(3, [0, 1]), late, tmp_path / "stale.log")
    assert [run.wait() for run in stale] == [2, 2]
    assert file.exists()
    for number, method in enumerate((f"file://{file}", f"tcp://127.0.0.1:{free_port()}")):
        out = tmp_path / str(number)
        meet = ["--trainer.strategy", "ddp", "--trainer.strategy.init_method", method, "--out", out]
        ended(ranks(by_hand(2), [*EXACT, *meet], tmp_path / f"{number}.log"))
        assert weights(out) == alone


@pytest.mark.slow
def test_runs_that_start_at_once_never_meet_on_a_port(alone: dict[str, bytes], tmp_path: Path) -> None:
    flags = [*EXACT, "--trainer.devices", "2", "--out"]
    ended([Run(kd.main, [*flags, str(tmp_path / str(i))], log=tmp_path / f"{i}.log") for i in range(3)])
    assert all(weights(tmp_path / str(i)) == alone for i in range(3))
    held = [rendezvous.bind("127.0.0.1") for _ in range(200)]  # a port is held from the moment it is chosen
    assert len({each.getsockname()[1] for each in held}) == 200
    for each in held:
        each.close()


# What can't be


def told(runs: list[Run], out: Path, idle: float = 30) -> list[str]:
    """The lines of ranks that ended because of bad input, with nothing trained."""
    assert {run.wait(idle) for run in runs} == {2}, "".join(run.output for run in runs)
    assert not list(out.glob("seed*"))
    return "".join(run.said for run in runs).splitlines()


def test_an_address_that_nobody_answers(tmp_path: Path) -> None:
    method, out = f"tcp://127.0.0.1:{free_port()}", tmp_path / "run"
    lines = told(ranks(by_hand(2, [1], LOCAL_RANK=0), [*TINY, *MEET, method, "--out", out], tmp_path / "log"), out, 15)
    told_by = "--trainer.strategy.init_method"
    expected = "expected rank 0 to answer there within 2 s, the timeout; nobody did"
    assert lines == [f"error: {told_by} {method}: {expected}"]
    bare = [*TINY, *MEET[:-1], "--out", out]
    given = by_hand(2, [1], LOCAL_RANK=0, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    (line,) = told(ranks(given, bare, tmp_path / "log2"), out)
    assert line == f"error: MASTER_ADDR 127.0.0.1 MASTER_PORT {given[0]['MASTER_PORT']}: {expected}"


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        runs = ranks(by_hand(2, [0]), [*TINY, *MEET, f"tcp://127.0.0.1:{port}", "--out", out], tmp_path / "log")
        own = [*TINY, *MEET[:-1], "--trainer.devices", "2", "--out", out]
        runs += ranks([{"MASTER_PORT": port}], own, tmp_path / "own")
        first, second = told(runs, out)
    expected = "expected a port that is free; Address already in use"
    assert first == f"error: --trainer.strategy.init_method tcp://127.0.0.1:{port}: {expected}"
    assert second == f"error: MASTER_PORT {port}: {expected}"


@pytest.mark.slow
def test_a_world_that_never_gets_complete(tmp_path: Path) -> None:
    out = tmp_path / "run"
    argv = [*TINY, *MEET, f"file://{tmp_path}/f", "--trainer.strategy.timeout", "10", "--out", out]  # they may be late
    lines = told(ranks(by_hand(3, [0, 2]), argv, tmp_path / "log"), out)
    # A slow rank says that it waits, before or after another has said the fault.
    assert "error: --trainer.strategy.timeout 10: expected 3 ranks within that time; rank 1 has not come" in lines


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_is_there_twice(size: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = [{"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"} for rank in (0, 1, 1)]
    runs = ranks(given, [*TINY, *MEET, f"file://{tmp_path}/f", "--out", out], tmp_path / "log")
    codes = [run.wait() for run in runs]
    said = f"error: rank 1: expected each of the {size} ranks once; this one was started twice\n"
    outputs = [run.said for run in runs]
    if codes == [2, 2, 2]:  # before the others had met
        assert set(outputs) <= {said, ""}
        assert outputs[0] == said
        assert not list(out.glob("seed*"))
    else:  # the others train
        assert size == 2
        assert sorted(codes) == [0, 0, 2], "".join(outputs)
        own = outputs[codes.index(2)]
        assert own == said or own.endswith("it has not come, or has all its ranks\n")  # once the others had met
        assert (out / "results.json").exists()


BAD: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "a rank beyond the world": (
        {"RANK": 2, "WORLD_SIZE": 2}, [], "RANK 2: expected a number from 0 to 1, as WORLD_SIZE is 2",
    ),
    "no number": ({"RANK": "x", "WORLD_SIZE": 2}, [], "RANK x: expected a number"),
    "no number of its machine": (
        {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": "x"}, [], "LOCAL_RANK x: expected a number",
    ),
    "no port": (
        {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "abc"}, [],
        "MASTER_PORT abc: expected a port, 1 to 65535",
    ),
    "no port for ranks that are started here": (
        {"MASTER_PORT": "99999"}, ["--trainer.devices", "2"], "MASTER_PORT 99999: expected a port, 1 to 65535",
    ),
    "nodes without a launcher": (
        {}, ["--trainer.num_nodes", "2"],
        "--trainer.num_nodes 2: expected 1, unless torchrun, srun or mpirun starts the ranks",
    ),
    "another number than was started": (
        {"RANK": 0, "WORLD_SIZE": 2}, ["--trainer.devices", "3"],
        "--trainer.devices 3: expected 2 on each of 1 nodes, as 2 ranks were started",
    ),
    "one device for several that were started": (
        {"RANK": 1, "WORLD_SIZE": 2}, ["--trainer.devices", "1"],
        "--trainer.devices 1: expected 2 on each of 1 nodes, as 2 ranks were started",
    ),
    "no such way to meet": (
        {}, [*MEET, "udp://x"],
        "--trainer.strategy.init_method udp://x: expected env://, tcp://HOST:PORT or file:///PATH",
    ),
    "no folder for the file": (
        {"RANK": 0, "WORLD_SIZE": 2}, [*MEET, "file:///no/f"],
        "--trainer.strategy.init_method file:///no/f: expected a file that can be written, in a folder that is there",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_what_was_started_wrongly_is_one_line(kind: str, tmp_path: Path) -> None:
    given, flags, line = BAD[kind]
    out = tmp_path / "run"
    assert told(ranks([given], [*TINY, *flags, "--out", out], tmp_path / "log"), out) == [f"error: {line}"]


LEFT_OVER: dict[str, tuple[dict[str, str], str, str]] = {  # variables, the one that is refused, what it lacks
    "torchrun": ({"RANK": "1", "LOCAL_RANK": "1"}, "RANK", "WORLD_SIZE"),
    "lightning": ({"LOCAL_RANK": "1"}, "LOCAL_RANK", "RANK and WORLD_SIZE"),
    "half of torchrun": ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK", "RANK"),
    "slurm": ({"SLURM_PROCID": "3"}, "SLURM_PROCID", "SLURM_NTASKS"),
    "half of slurm": (
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, "SLURM_PROCID", "SLURM_LOCALID and SLURM_NODEID",
    ),
    "open mpi": ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpich": ({"PMI_RANK": "x"}, "PMI_RANK", "PMI_SIZE"),
}  # fmt: skip
COMMANDS = {"kd": kd.main, "gpt": gpt.main, "predict": predict.main, "export": export.main, "hardware": hardware.main}


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if command.is_launchers(name)]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("kind", LEFT_OVER)
def test_a_rank_that_another_launch_has_left_is_refused(
    kind: str, no_launcher: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    variables, name, lacks = LEFT_OVER[kind]
    for variable, value in variables.items():
        no_launcher.setenv(variable, value)
    expected = f"expected {lacks} beside it, as a launcher sets them; or, for one process, `unset {name}`"
    line = f"{name} {variables[name]}: {expected}"
    for main in COMMANDS.values():
        assert refusal(main) == line
    with pytest.raises(SystemExit, match="2"):
        start.script()  # before anything loads Lightning, which reads the variables too
    assert capsys.readouterr().err == f"error: {line}\n"


def test_rank_zero_of_an_unknown_number_is_alone(no_launcher: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):  # of an sbatch without --ntasks
        no_launcher.setenv(name, "0")
    no_launcher.setenv("WORLD_SIZE", "4")
    ranks_of.check_variables()
    assert (place(), launches.is_main_process(), ranks_of.is_first_of_machine()) == (None, True, True)
    assert "LOCAL_RANK" not in os.environ


@pytest.mark.parametrize(
    ("variables", "is_main"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "LOCAL_RANK": "1"}, False),  # a fork under mpirun
        ({"SLURM_PROCID": "0", "LOCAL_RANK": "1"}, False),  # a fork in the script of an sbatch
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NAME": "bash"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, False),
    ],
)
def test_who_writes_files(variables: dict[str, str], is_main: bool, no_launcher: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        no_launcher.setenv(name, value)
    assert launches.is_main_process() == is_main


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_says_for_whom_and_how_to_go_on_alone(rank: int, tmp_path: Path) -> None:
    def impatient(_: int) -> None:
        launches.PATIENCE = 0.1, 0.1

    out = tmp_path / "run"
    given = by_hand(3, [rank], MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    runs = ranks(given, [*TINY, *MEET[:-1], "--out", out], tmp_path / "log", impatient)
    line = f"waiting for 2 other processes: this is rank {rank} of 3 (WORLD_SIZE=3)"
    assert told(runs, out)[0] == f"{line}; one process alone needs no launcher: `unset RANK WORLD_SIZE`"


def test_sub_processes_that_come_too_late_are_one_line(tmp_path: Path) -> None:
    def as_a_script(rank: int) -> None:
        sys.argv = [str(ROOT / "experiments" / "kd.py"), *argv]
        sys.modules["__main__"].__spec__ = None

    out = tmp_path / "run"
    argv = [*TINY, *MEET[:-1], "--trainer.strategy.start_method", "popen", "--trainer.devices", "3", "--out", str(out)]
    run = ranks([{}], argv, tmp_path / "log", as_a_script)[0]
    assert run.wait(30) == 2, run.output
    assert run.said.splitlines()[-1] == (
        "error: --trainer.strategy.timeout 2: expected 3 ranks within that time; ranks 1, 2 have not come"
    )


@pytest.mark.parametrize("method", ["tcp://h", "tcp://h:x", "tcp://h:99999", "file://", "file://x/y", "", "env://x"])
def test_where_ranks_can_not_meet(method: str) -> None:
    with pytest.raises(ValueError, match="expected env://, tcp://HOST:PORT or file:///PATH"):
        rendezvous.check_init_method(method)
