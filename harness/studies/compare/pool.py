"""Runs that differ in their seeds alone, such as those of a job array, as one run with all of these seeds."""

from collections.abc import Sequence
from pathlib import Path

from apprentice.errors import BadInput
from harness.reports.interactive import save_results
from harness.reports.report import Facts, machine
from harness.reports.results import bake_off_results
from harness.runs.folders import run_files
from harness.runs.quiet import notice
from harness.runs.records import FitRecord, NetRecord, reading
from harness.studies.compare.fairness import known_places, other_samples
from harness.studies.compare.page import check_folder, folder_name
from harness.studies.compare.runs import Run

HEAD = ("experiment", "data", "fingerprint", "hardware", "versions", "config", "free")
MORE, COST = ("classes", "tuning", "tuning_rungs"), ("tuning_cost",)


def pool(runs: Sequence[Run]) -> Facts:
    """The results of one run of kd.py with the seeds of all; the hardware is the first one's.

    Raises:
        BadInput: a run is of another experiment, differs in more than its seeds, or has a seed of another; its
            records of finished fits are not there.
    """
    first = runs[0]
    for run in runs:
        if "students" not in run.results:
            raise BadInput("RUN", run.name, f"a run of kd.py; this one is of {run.results['experiment']}.py")
        if told := _differs(first, run):
            raise BadInput("RUN", run.name, f"a run that differs from {first.name} in its seeds alone; {told}")
    of_seed = {seed: run for run in runs for seed in run.seeds}
    if len(of_seed) < sum(len(run.seeds) for run in runs):
        twice = next(seed for seed in of_seed if sum(seed in run.seeds for run in runs) > 1)
        raise BadInput("RUN", of_seed[twice].name, f"each seed once; {twice} is in another run, too")
    seeds = sorted(of_seed)
    fits = {seed: _fits(of_seed[seed], seed) for seed in seeds}
    head = {key: first.results[key] for key in HEAD if key in first.results}
    commits = dict.fromkeys(commit for run in runs for commit in run.results.get("commits", ()))
    ran = {run.name: machine(run.results).get("Commit", "unknown") for run in runs}
    if len({*ran.values()}) > 1:
        notice(f"commits differ: {'; '.join(f'{commit} of {name}' for name, commit in ran.items())}")
    loaded = all(seconds is None for seconds in first.results["teacher"]["fit_seconds"])
    students = first.results["students"]
    return bake_off_results(
        {**head, "commits": [*commits], "config": {**head["config"], "seeds": seeds}, "seeds": seeds},
        [teacher for teacher, _ in fits.values()],
        {name: [nets[name] for _, nets in fits.values()] for name in students},
        [of_seed[seed].results["students_fit_seconds"][of_seed[seed].seeds.index(seed)] for seed in seeds],
        first.kind.metric,
        one_teacher=loaded and "{seed}" not in (first.setting("teacher_ckpt") or ""),
        variants={name: entry["variant"] for name, entry in students.items() if "variant" in entry},
        ranked=bool(first.setting("zoo")),
    ) | {
        "pooled": [run.name for run in runs], **{key: first.results[key] for key in MORE if key in first.results},
        **_sum([{key: run.results[key] for key in COST if key in run.results} for run in runs]),
    }  # fmt: skip


def _sum(costs: Sequence[Facts]) -> Facts:
    """What the searches of all runs cost together, as each made its own; what not all of them know is left out."""
    common = {key: [cost[key] for cost in costs] for key in costs[0] if all(key in cost for cost in costs)}
    return {key: _sum(each) if isinstance(each[0], dict) else sum(each) for key, each in common.items()}


def _differs(first: Run, run: Run) -> str:
    """What differs but the seeds, in words; empty if nothing does."""
    ours, theirs = (
        {
            **each.results["data"],
            **each.results["versions"],
            **each.settings,
            "classes": each.results.get("classes"),
            "students": " ".join(each.entries),
            "the choice of settings": {name: of["chosen"] for name, of in each.results.get("tuning", {}).items()},
        }
        for each in (run, first)
    )
    if parts := other_samples(first, run):
        return f"{', '.join(parts)}: the samples are others"
    keys = [
        key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key) and key not in known_places(first, run)
    ]
    other = [key for key in keys if key != "seeds" and not key.startswith("seeds.") and not first.is_free(key)]
    return f"{other[0]} is {ours.get(other[0])}, not {theirs.get(other[0])}" if other else ""


def _fits(run: Run, seed: int) -> tuple[FitRecord, dict[str, NetRecord]]:
    """The records of a seed: of its teacher's fit, and of its students by name."""
    folder, nets = run.folder / f"seed{seed}", dict[str, NetRecord]()
    with reading(run.name, "RUN", "the records of finished fits beside results.json"):
        teacher = FitRecord.read(folder / "teacher.json")
        for path in sorted(folder.glob("students*.json")):
            nets |= FitRecord.read(path).nets
        return teacher, {name: nets[name] for name in run.entries}


def save(results: Facts, out: str | Path | None = None, commands: Sequence[str] = ()) -> Path:
    """Write report.html, results.md, .png and .json, and return their folder: `out`, or one under runs/pool/.

    `commands` made the runs and pooled them.
    """
    folder = Path(out or Path("runs", "pool", folder_name(results["pooled"])))
    ours = ("results.json", "results.md", "results.png")  # of an earlier pool
    check_folder(folder, ["compare.json", *(name for name in run_files(folder) if name not in ours)])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_results(folder, results, commands=commands)
    except OSError as error:
        raise BadInput("out", folder, f"a folder that can be written ({error.strerror})") from error
    return folder
