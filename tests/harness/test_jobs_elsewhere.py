"""Fits as jobs of SLURM, by a stand-in, and of Ray's cluster on this machine: the bits of one process."""

import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments import kd
from harness.jobs import slurm
from tests import waiting
from tests.commands import Refusal, start
from tests.harness.test_jobs import check, facts, finished, processes
from tests.launching import ROOT, TINY, faults, until
from tests.slurm import install, submitted, tree

TWO = [*TINY, "--seeds", "2", "--only", "ce", "kd"]
PAGE = (ROOT / "docs" / "jobs.md").read_text()


def documented(launcher: str) -> list[str]:
    """The launcher's flags as the page has them."""
    (flags,) = re.findall(rf"python experiments/kd\.py (--launcher {launcher}[^`\n]*)", PAGE)
    return flags.split()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process leaves."""
    out = tmp_path_factory.mktemp("alone") / "run"
    start(out, *TWO).check()
    return out


@pytest.fixture
def cluster(tmp_path: Path) -> Callable[[], None]:
    """SLURM's stand-in; what it returns makes the process that calls it use that."""
    variables = install(tmp_path / "slurm")

    def use() -> None:
        os.environ.update(variables)
        slurm.ASKING = 0.5

    return use


def tasks(out: Path) -> set[int]:
    """The processes of submitit that run the jobs."""
    parents = set[int]()
    for pid in processes(out):
        with contextlib.suppress(OSError):
            parents.add(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]))
    return parents


@pytest.mark.slow
@pytest.mark.extras("submitit")
def test_jobs_of_slurm_that_are_lost_or_preempted_go_on(
    alone: Path, cluster: Callable[[], None], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    happens = faults(tmp_path / "faults.yaml", ("Left", {"step": 3}), ("Held", {"step": 4}))
    run = start(out, *TWO, *documented("slurm"), *happens, before=cluster)
    until((tmp_path / "Held").exists, run, idle=300)
    preempted = tasks(out)
    assert preempted
    for pid in preempted:  # as SLURM does before it takes the machine away
        os.kill(pid, signal.SIGUSR2)
    output = check(run, out)
    assert re.search(r"job seed\d: lost \(job \d+ of SLURM NODE_FAIL\); it goes on, 1 of 2 retries", output)
    assert finished(out) == finished(alone)
    assert facts(out, "trainer", "free") == facts(alone, "trainer", "free")
    story = [line.split()[0] for line in submitted(tmp_path / "slurm")]
    assert (story.count("sbatch"), story.count("scontrol") >= 1) == (3, True)
    script = tmp_path / "slurm" / "jobs" / "1000.sh"
    for line in ("--job-name=seed0", "--partition=gpu", "--time=120", "--nodes=1", "--cpus-per-task=1"):
        assert f"#SBATCH {line}\n" in script.read_text()


@pytest.mark.slow
@pytest.mark.extras("submitit")
def test_a_run_that_is_stopped_cancels_its_jobs_of_slurm(
    alone: Path, cluster: Callable[[], None], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    held = faults(tmp_path / "faults.yaml", ("Held", {"step": 4}))
    run = start(out, *TWO, "--launcher", "slurm", *held, before=cluster)
    until((tmp_path / "Held").exists, run, idle=300)
    os.kill(run.process.pid, signal.SIGTERM)
    assert check(run, out, 143).endswith(f"--out {out} --resume true\n")
    assert sorted(line for line in submitted(tmp_path / "slurm") if "scancel" in line) == [
        "scancel 1000",
        "scancel 1001",
    ]
    start(out, "--resume", "true", "--launcher", "null").check()
    assert finished(out) == finished(alone)


@pytest.mark.extras("submitit")
def test_slurm_is_refused_where_there_is_none(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    line = refusal(kd.main, *TWO, "--launcher", "slurm")
    assert line == "--launcher slurm: expected a machine from which SLURM takes jobs; this one has no srun"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.extras("ray")
def test_two_workers_of_ray_of_which_one_is_killed(alone: Path, tmp_path: Path) -> None:
    """Its cluster starts with the run and ends with it."""
    out = tmp_path / "run"
    lost = faults(tmp_path / "faults.yaml", ("Left", {"step": 4}))
    run = start(out, *TWO, *documented("ray"), *lost)
    until((tmp_path / "Left").exists, run, idle=300)
    begun = set(tree(run.process.pid))
    output = check(run, out)
    assert re.search(r"job seed\d: lost \(\w+\); it goes on, 1 of 2 retries", output)
    assert finished(out) == finished(alone)
    assert facts(out, "trainer", "free") == facts(alone, "trainer", "free")
    waiting.wait(lambda: not [pid for pid in begun if tree(pid)], lambda: begun, 30)
    assert not [pid for pid in begun if tree(pid)]
