"""Fits as jobs on this machine: the bits of one process, whatever is killed, stopped or divided."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock, Timeout

from apprentice.errors import BadInput
from experiments import kd
from harness.jobs import base, fits
from harness.jobs.base import Engine, Job, Needs, Outcome, Running, Start
from harness.jobs.command import Command
from harness.jobs.fits import _check_device, divide
from harness.jobs.ray import Ray
from harness.jobs.slurm import Slurm
from harness.runs import files, signals
from harness.runs.plans import Arm, FitPlan
from harness.studies.launcher import VARIABLE, without_jobs
from tests import forked_jobs, waiting
from tests.commands import Refusal, curves, lasting, left_by_overwriting, results, start
from tests.launching import TINY, faults, until
from tests.processes import Run

TWO = [*TINY, "--seeds", "2"]
LOCAL = ["--launcher", "local", "--launcher.jobs", "2"]


def finished(out: Path) -> dict[str, bytes]:
    """The files of weights of a finished run."""
    assert (out / "results.json").exists()
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.glob("seed*/*/weights.pt"))}


def facts(out: Path, *but: str) -> Any:
    """What results.json has, without times and what is of a launcher."""
    return lasting(results(out), "launcher", "hardware", *but)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process leaves."""
    out = tmp_path_factory.mktemp("alone") / "run"
    start(out, *TWO).check()
    return out


def processes(out: Path) -> list[int]:
    """The jobs of a run that are alive."""
    alive = forked_jobs.processes(out)
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{VARIABLE}={out}" in path.read_text(errors="replace"):
                alive.append(int(path.parent.name))
    return alive


def begin(out: Path, *flags: str, jobs: Callable[[], None] | None = forked_jobs.fork_jobs) -> Run:
    """The main job, with a log of its own, whose jobs are forks, too."""
    out.with_suffix(".log").unlink(missing_ok=True)
    return start(out, *flags, before=jobs)


def check(run: Run, out: Path, code: int = 0) -> str:
    """The output of a run with jobs, once it has ended with this code; none of them is left."""
    waiting.wait(lambda: run.process.exitcode is not None, lambda: [*run.processes(), *processes(out)], 90)
    assert run.wait() == code, "".join(path.read_text() for path in [run.log, *out.glob("jobs/*.log")])
    assert not processes(out)
    return run.output


# Jobs of an engine


class Played:
    """A job that runs for some turns and ends with each of these codes in turn."""

    def __init__(self, engine: "Stage", name: str, code: int) -> None:
        self.engine, self.name, self.code, self.turns = engine, name, code, 2

    def poll(self) -> Outcome | None:
        self.turns -= 1
        if self.turns:
            return None
        self.engine.story.append(f"{self.name} {self.code}")
        return Outcome(self.code)

    def cancel(self) -> None:
        self.engine.story.append(f"{self.name} cancelled")


class Stage(Engine):
    """Plays jobs, whose exit codes are given by name; others end with 0."""

    def __init__(self, codes: dict[str, list[int]], **options: Any) -> None:
        super().__init__(**options)
        self.codes, self.story = codes, list[str]()

    @contextmanager
    def open(self, folder: Path, needs: Needs) -> Iterator[Start]:
        def begin(name: str, _: Command) -> Played:
            self.story.append(f"{name} starts")
            return Played(self, name, self.codes.get(name, [0]).pop(0) if self.codes.get(name) else 0)

        yield begin


def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: Stage, *jobs: str) -> list[str]:
    monkeypatch.setattr(base, "POLLING", 0.0)
    commands = [name.partition("<") for name in jobs]
    waiting = [Job(name, Command((), "", str(tmp_path / f"{name}.log")), after or None) for name, _, after in commands]
    engine.run_jobs(waiting, tmp_path, Needs(1))
    return engine.story


def test_jobs_run_as_many_at_a_time_as_there_is_room_and_after_those_that_they_wait_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = play(monkeypatch, tmp_path, Stage({}, jobs=2), "a", "b<a", "c<a", "d")
    assert story == [
        "a starts", "d starts", "a 0", "d 0", "b starts", "c starts", "b 0", "c 0",
    ]  # fmt: skip
    assert capsys.readouterr().out.splitlines()[-1].endswith("4 of 4")


def test_a_killed_job_starts_again_and_a_failed_one_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.log").write_text("...\nerror: --optimizer.lr 1e9: expected less\n")
    engine = Stage({"a": [-9, 143], "b": [2]}, jobs=1)
    with pytest.raises(ChildProcessError) as error:
        play(monkeypatch, tmp_path, engine, "a", "b", "c<b", "d")
    starts = [line for line in engine.story if "starts" in line]
    assert starts == ["a starts", "a starts", "a starts", "b starts", "d starts"]
    said = f"job b: --optimizer.lr 1e9: expected less (log: {tmp_path}/b.log); {base.GOES_ON}"
    assert str(error.value) == said
    told = capsys.readouterr()
    assert "job a: lost (signal 9); it goes on, 1 of 2 retries" in told.out
    assert told.err == "job b: failed (exit code 2)\n"


def test_a_job_that_is_killed_too_often_has_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match=r"^job a: signal 9 \(log: .*a.log\); what has ended is kept"):
        play(monkeypatch, tmp_path, Stage({"a": [-9, -9]}, retries=1), "a")


def test_an_error_of_an_engine_cancels_what_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = Stage({"b": ["not a code"]}, jobs=2)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        play(monkeypatch, tmp_path, engine, "b", "a")
    assert "a cancelled" in engine.story


def test_no_job_starts_after_a_stop_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Slow(Stage):
        @contextmanager
        def open(self, folder: Path, needs: Needs) -> Iterator[Start]:
            with super().open(folder, needs) as start:

                def begin(name: str, command: Command) -> Running:
                    monkeypatch.setattr(signals.State, "requested", signal.SIGINT)
                    return start(name, command)

                yield begin

    engine = Slow({}, jobs=9)
    with pytest.raises(signals.Interrupted):
        play(monkeypatch, tmp_path, engine, "a", "b", "c")
    assert [line for line in engine.story if "starts" in line] == ["a starts"]


def test_a_seed_is_a_job_and_students_of_several_fits_wait_for_their_teacher() -> None:
    def plans(seed: int, *names: str) -> list[FitPlan]:
        return [FitPlan(seed, name, (Arm("ce", "student"),)) for name in names]

    whole, apart, new = plans(0, "teacher", "students"), plans(1, "teacher", "rung1", "rung1-2"), plans(2, "students-2")
    assert list(divide([*whole, *apart, *new])) == [
        ("seed0", tuple(whole), None),
        ("seed1-teacher", (apart[0],), None),
        ("seed1-rung1", (apart[1],), "seed1-teacher"),
        ("seed1-rung1-2", (apart[2],), "seed1-teacher"),
        ("seed2-students-2", (new[0],), None),
    ]


def test_a_fit_in_this_process_waits_for_the_seed_s_jobs_and_they_for_it(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    job, other, later = (tmp_path / "jobs" / f"{name}.lock" for name in ("seed1-teacher", "seed10", "seed1"))
    for path in (job, other, later):
        path.touch()
    session: Any = SimpleNamespace(out=tmp_path)
    running, order = FileLock(job), list[str]()
    running.acquire()

    def end() -> None:
        order.append("the job ends")
        running.release(force=True)

    with FileLock(other), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fits, "notice", lambda _: end())
        with without_jobs(session, FitPlan(1, "students", ())):
            order.append("the fit begins")
            for path in (job, later):
                with pytest.raises(Timeout):
                    FileLock(path).acquire(timeout=0)
    assert order == ["the job ends", "the fit begins"]
    FileLock(job).acquire(timeout=0)


def test_a_command_has_none_of_a_launchers_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SLURM_PROCID", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    log = tmp_path / "log"
    words = ("/bin/sh", "-c", "echo ${SLURM_PROCID-none} ${RANK-none} ${LOCAL_RANK-none} $OMP_NUM_THREADS; exit 3")
    assert Command(words, str(tmp_path), str(log), {"OMP_NUM_THREADS": "1"})() == 3
    assert log.read_text() == "none none none 1\n"


def test_a_job_gets_the_gpus_that_it_needs_and_is_refused_without() -> None:
    needs = Needs(3, 2, "cuda")
    for engine in (Ray, Slurm):
        assert engine().requested(needs) == needs
        assert engine(cpus=1, gpus=0).requested(needs) == Needs(1, 0, "cuda")
    with pytest.raises(BadInput, match=r"launcher.gpus 0: expected 1 or more, as seed0 was started for cuda"):
        _check_device("cpu", "cuda", "seed0")
    _check_device("cuda", "cpu", "seed0")


def test_without_an_address_ray_starts_a_cluster_and_joins_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []

    def remote(**options: Any) -> Callable[[Any], Any]:
        asked.append(options)
        return lambda task: task

    fake = SimpleNamespace(init=lambda **options: asked.append(options), remote=remote, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", fake)
    for address in (None, "here:1"):
        with Ray(address=address).open(tmp_path, Needs(1, 2)):
            pass
    started, task, joined, _ = asked
    assert (started["address"], joined["address"]) == ("local", "here:1")
    assert "num_cpus" in started
    assert "num_cpus" not in joined
    assert task["num_gpus"] == 2


@pytest.mark.extras("submitit")
def test_slurm_is_asked_for_the_gpus_that_a_job_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}
    executor = SimpleNamespace(update_parameters=lambda **options: asked.update(options))
    monkeypatch.setattr("submitit.AutoExecutor", lambda **_: executor)
    with Slurm().open(tmp_path, Needs(3, 2, "cuda")):
        assert (asked["cpus_per_task"], asked["gpus_per_node"]) == (3, 2)


def test_jobs_record_their_files_apart(tmp_path: Path) -> None:
    with files.record_files(tmp_path):
        files.write_text(tmp_path / "a", "")
    with files.record_files(tmp_path, "seed0"):
        files.write_text(tmp_path / "b", "")
    assert {path.name for path in files.list_recorded(tmp_path)} == {"a", "b"}
    assert (tmp_path / ".files.seed0").read_text() == '\n"b"'
    files.remove_recorded(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "begins", "says"),
    [
        (["--launcher", "locall"], "--launcher locall: expected local, ray, slurm or", "near: local"),
        (["--launcher", "Local", "--launcher.jobs", "0"], "--launcher.jobs 0: ", "at least 1"),
        (["--launcher", "slurm", "--launcher.minutes", "0"], "--launcher.minutes 0: ", "at least 1"),
        (["--launcher", "local", "--launcher.retries", "-1"], "--launcher.retries -1: ", "0 or more"),
    ],
)
def test_wrong_launchers_are_refused(flags: list[str], begins: str, says: str, refusal: Refusal) -> None:
    line = refusal(kd.main, *TINY, *flags)
    assert line.startswith(begins)
    assert says in line


def test_an_engine_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, refusal: Refusal) -> None:
    for package, name in (("submitit", "slurm"), ("ray", "ray")):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        line = refusal(kd.main, *TINY, "--launcher", name)
        assert line.startswith(f"{package}: expected it installed; the extra [{name}] brings it")


def test_ranks_of_another_launcher_start_no_jobs(monkeypatch: pytest.MonkeyPatch, refusal: Refusal) -> None:
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, value)
    line = refusal(kd.main, *TINY, "--launcher", "local")
    assert line == "--launcher local: expected one process that starts jobs; hand started 2"


# Runs


@pytest.mark.slow
def test_a_killed_job_goes_on_to_the_bits_of_one_process(alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    killed = faults(tmp_path / "faults.yaml", ("Killed", {"step": 4}))
    output = check(begin(out, *TWO, *LOCAL, *killed), out)
    assert "lost (signal 9); it goes on, 1 of 2 retries" in output
    assert finished(out) == finished(alone)
    assert facts(out, "trainer", "free") == facts(alone, "trainer", "free")
    assert curves(out).keys() == curves(alone).keys()
    assert not list((out / "jobs").glob("*.work"))
    assert check(begin(out, "--resume", "true"), out).count("job ") == 0  # nothing is left to do
    assert left_by_overwriting(out, tmp_path) == set()


@pytest.mark.slow
def test_students_in_jobs_of_their_own_are_those_in_company(alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    output = check(begin(out, *TINY, *LOCAL, "--launcher.students", "1"), out)
    done = [line.split(":")[0] for line in output.splitlines() if ": done after" in line]
    assert (done[0], sorted(done[1:])) == ("job seed0-teacher", ["job seed0-students", "job seed0-students-2"])
    seed0 = {name: weights for name, weights in finished(alone).items() if name.startswith("seed0/")}
    assert finished(out) == seed0
    assert results(out)["students"].keys() == results(alone)["students"].keys()


@pytest.mark.slow
def test_a_stopped_run_saves_its_jobs_and_goes_on(alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    held = faults(tmp_path / "faults.yaml", ("Held", {"step": 4}))
    run = begin(out, *TWO, *LOCAL, *held)
    until((tmp_path / "Held").exists, run)
    os.kill(run.process.pid, signal.SIGINT)
    assert check(run, out, 130).endswith(f"stopped; go on with: python experiments/kd.py --out {out} --resume true\n")
    assert list(out.glob("seed*/teacher.ckpt"))
    assert not (out / "results.json").exists()
    check(begin(out, "--resume", "true"), out)  # in one process
    assert finished(out) == finished(alone)


@pytest.mark.slow
def test_jobs_end_with_the_process_that_started_them(alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    held = faults(tmp_path / "faults.yaml", ("Held", {"step": 4}))
    run = begin(out, *TWO, *LOCAL, *held)
    until((tmp_path / "Held").exists, run)
    run.process.kill()
    run.process.join()
    check(begin(out, *LOCAL, "--resume", "true"), out)  # jobs wait for those that still save
    assert finished(out) == finished(alone)


@pytest.mark.slow
def test_a_search_runs_as_jobs(tmp_path: Path) -> None:
    flags = [*TINY, "--tune", "2", "--tune_seeds", "1"]
    one, many = tmp_path / "one", tmp_path / "many"
    start(one, *flags).check()
    output = check(begin(many, *flags, *LOCAL), many)
    done = [line.split(":")[0] for line in output.splitlines() if ": done after" in line]
    assert done == ["job seed10000", "job seed10000-rung2", "job seed0"]
    assert finished(many) == finished(one)
    assert facts(many, "seconds", "teacher_seconds") == facts(one, "seconds", "teacher_seconds")


@pytest.mark.slow
def test_a_failed_job_is_named_with_its_log(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = begin(out, *TWO, *LOCAL, "--optimizer.lr", "1e30", jobs=None)  # as users start them
    (line,) = [line for line in check(run, out, 2).splitlines() if line.startswith("error: ")]
    assert line.startswith("error: job seed")
    for seed in range(2):
        assert f"with seed {seed} its " in line
        assert f"(log: {out}/jobs/seed{seed}.log)" in line
    assert line.endswith("what has ended is kept, and --resume true goes on")
