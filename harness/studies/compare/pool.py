"""Runs that differ in their seeds alone, such as those of a job array, as one run with all of these seeds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from apprentice.errors import BadInput
from datamodules.fingerprints import changed_parts
from harness.reports.bakeoff.save import save_results
from harness.reports.combine import combine
from harness.reports.report import machine
from harness.reports.results import Results
from harness.runs.quiet import notice
from harness.runs.records import FitRecord, Header, NetRecord, reading
from harness.studies.compare.fairness import changed_nets, known_by_content
from harness.studies.compare.page import table_folder
from harness.studies.compare.runs import FinishedRun


def pool(runs: Sequence[FinishedRun]) -> Results:
    """Combine runs of kd.py to one with the seeds of all; the hardware is the first one's.

    Raises:
        BadInput: a run is of another experiment, differs in more than its seeds, or has a seed of another; its
            records of finished fits are not there.
    """
    first, head = runs[0], runs[0].results
    for run in runs:
        if difference := _differs(first, run):
            raise BadInput("RUN", run.name, f"a run that differs from {first.name} in its seeds alone; {difference}")
    of_seed = {seed: run for run in runs for seed in run.seeds}
    if len(of_seed) < sum(len(run.seeds) for run in runs):
        twice = next(seed for seed in of_seed if sum(seed in run.seeds for run in runs) > 1)
        raise BadInput("RUN", of_seed[twice].name, f"each seed once; {twice} is in another run, too")
    seeds = sorted(of_seed)
    fits = {seed: _fits(of_seed[seed], seed) for seed in seeds}
    ran = {run.name: machine(vars(run.results)).get("Commit", "unknown") for run in runs}
    if len({*ran.values()}) > 1:
        notice(f"commits differ: {'; '.join(f'{commit} of {name}' for name, commit in ran.items())}")
    header = Header.read(head.to_json())
    header.config, header.seeds = {**header.config, "seeds": seeds}, seeds
    header.commits = list(dict.fromkeys(commit for run in runs for commit in run.results.commits))
    seconds = {seed: time for run in runs for seed, time in run.results.seconds_of_seed().items()}
    pooled = combine(
        header,
        [teacher for teacher, _ in fits.values() if teacher is not None],
        {name: [nets[name] for _, nets in fits.values()] for name in head.students},
        [seconds[seed] for seed in seeds],
        head.metric,
        variants={name: student.variant for name, student in head.students.items() if student.variant},
        taught={name: student.taught_by for name, student in head.students.items() if student.taught_by},
        more_teachers={
            name: [_fit_of_teacher(of_seed[seed], seed, name) for seed in seeds] for name in head.more_teachers
        },
    )
    pooled.pooled, pooled.classes = [run.name for run in runs], head.classes
    if head.search:
        costs = [part.search.cost for part in (run.results for run in runs) if part.search]
        pooled.search = replace(head.search, cost=sum(costs[1:], costs[0]))  # each run searched by itself
    return pooled


def _differs(first: FinishedRun, run: FinishedRun) -> str:
    """Say what differs besides the seeds; empty if nothing does."""
    ours, theirs = (
        {
            **side.results.data,
            **side.results.versions,
            **side.settings,
            "classes": side.results.classes,
            "students": " ".join(side.entries),
            "the choice of settings": _choices(side),
        }
        for side in (run, first)
    )
    if parts := changed_parts(first.results.fingerprint, run.results.fingerprint):
        return f"{', '.join(parts)}: the samples are others"
    for net, change in changed_nets(first, run).items():
        if change:
            return f"of its {net} {change}"
    keys = [
        key
        for key in {**theirs, **ours}
        if ours.get(key) != theirs.get(key) and key not in known_by_content(first, run)
    ]
    other = [key for key in keys if key != "seeds" and not key.startswith("seeds.") and not first.is_free(key)]
    return f"{other[0]} is {ours.get(other[0])}, not {theirs.get(other[0])}" if other else ""


def _choices(run: FinishedRun) -> dict[str, int]:
    """Return the number of the setting that a search chose for each method."""
    search = run.results.search
    return {name: tuned.chosen for name, tuned in search.methods.items()} if search else {}


def _fit_of_teacher(run: FinishedRun, seed: int, name: str) -> FitRecord:
    with reading(run.name, "RUN", "the records of finished fits beside results.json"):
        return FitRecord.read(run.folder / f"seed{seed}" / f"{name}.json")


def _fits(run: FinishedRun, seed: int) -> tuple[FitRecord | None, dict[str, NetRecord]]:
    """Return the records of a seed: of its teacher's fit, if it has one, and of its students by name."""
    folder, nets = run.folder / f"seed{seed}", dict[str, NetRecord]()
    with reading(run.name, "RUN", "the records of finished fits beside results.json"):
        teacher = FitRecord.read(folder / "teacher.json") if run.results.teacher else None
        for path in sorted(folder.glob("students*.json")):
            nets |= FitRecord.read(path).nets
        return teacher, {name: nets[name] for name in run.entries}


def save(results: Results, out: str | Path | None = None, commands: Sequence[str] = ()) -> Path:
    """Write report.html, results.md, .png and .json, and return their folder: `out`, or one under runs/pool/.

    `commands` made the runs and pooled them.
    """
    files = ("results.json", "results.md", "results.png", "report.html")
    with table_folder(out, "pool", results.pooled, files) as folder:
        save_results(folder, results, commands=commands)
    return folder
