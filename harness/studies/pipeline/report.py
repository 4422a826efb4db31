"""The study told: a table on the terminal, results.md and its pictures, and what to take for this machine."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.reports.tables import NONE, Table, listed, paragraph, short
from harness.runs.files import write_bytes, write_text
from harness.studies.hardware.report import words
from harness.studies.pipeline import picture
from harness.studies.pipeline.rows import ONE_STAGE, Row

Facts = dict[str, Any]
COLUMNS = (
    "m: micro-batches of a step; split size: images of one at most. s a step: mean ± standard deviation over the "
    "repeats, of the slowest rank. Speed-up: over the first row, as in the tutorial; as micro-batches may be kinder "
    "to a processor's cache than a batch, compare with one device on the same micro-batches, too. Bound: p m / "
    "(m + p - 1) on p ranks, where each has one stage; the other schedules have smaller bubbles, or none."
)
SOURCE = (
    'Tutorial: PyTorch\'s "Single-Machine Model Parallel Best Practices", ResNet-50 on two GPUs, 120 images of 3 x 128 '
    "x 128, 1,000 classes; seconds and speed-up. It gives seconds for three steps: one GPU 3.75, split 4.02, split "
    "size 20 2.51, the best (12) 2.43; a third of that stands here."
)
NORM = "BatchNorm, where the net has it, sees a micro-batch: such rows don't train to the same weights. They are timed."


# The tutorial's figures: kind of row and images of a micro-batch, None for whole batches; seconds for three steps.
PUBLISHED = {("one", None): 3.75, ("split", None): 4.02, ("pipelined", 20): 2.51, ("pipelined", 12): 2.43}
PUBLISHED_STEPS = 3


class Found(NamedTuple):
    """What a run has found.

    Attributes:
        results: the content of results.json.
        timelines: by row, `sizes` of stages and `events` (rank, stage, micro-batch, kind, start, stop) of a step.
        rows: in the order of the table; some may be missing in the results.
        best: the fastest of the pipelined rows under the strategy's own schedule.
        missing: rows that are not in the table, and why.
    """

    results: Facts
    timelines: Mapping[str, Facts]
    rows: Sequence[Row]
    best: Row | None
    missing: Mapping[str, str]

    @property
    def measured(self) -> list[tuple[Row, Facts]]:
        """Rows with their facts."""
        facts = {each["name"]: each for each in self.results["rows"]}
        return [(row, facts[row.name]) for row in self.rows if row.name in facts]


def text(found: Found) -> str:
    """The table for a terminal, what its columns are, what is missing, and what to take."""
    return "\n\n".join([table(found).plain(), *map(paragraph, notes(found)), *advice(found)])


def save(folder: Path, found: Found) -> None:
    """Write results.md, results.png and timeline.png.

    Raises:
        OSError: the folder can't be written.
    """
    drawn = [(row, facts) for row, facts in found.measured if row.name in found.timelines]
    best = found.best.size if found.best is not None else None
    shown = [row.name for row, _ in drawn if row.kind == "split" or row.size == best]
    write_text(folder / "results.md", markdown(found))
    write_bytes(folder / "results.png", picture.speed(found.measured))
    if shown:
        write_bytes(folder / "timeline.png", picture.timelines({name: found.timelines[name] for name in shown}))


def markdown(found: Found) -> str:
    """results.md: what was measured on what, the table, the notes, the pictures, the advice."""
    config = found.results["config"]
    sizes = f"{config['batch_size']} images of 3 x {config['image_size']} x {config['image_size']}"
    net = config["net"]
    options = ", ".join(f"{name} {value}" for name, value in (net["init_args"] or {}).items() if value is not None)
    told = {
        "Net": f"{net['class_path'].rpartition('.')[2]} ({options})",
        "Step": f"{sizes}, {config['num_classes']} classes, mean squared error to one-hot labels, SGD 0.001",
        "Repeats": f"{config['repeats']} of {config['batches']} steps, after two that are not timed",
        "Hardware": words(found.results["hardware"]),
        "Versions": words(found.results["versions"]),
    }
    pictures = ["![seconds a step, and speed-up against the size of micro-batches](results.png)"]
    if found.timelines:
        pictures.append("![who computes what when in a step](timeline.png)")
    header = "\n".join(f"- {name}: {value}" for name, value in told.items())
    parts = ["# pipeline", header, table(found).markdown(), *notes(found), *pictures, *advice(found, fence="```")]
    return "\n\n".join(parts) + "\n"


def table(found: Found) -> Table:
    """One line a row."""
    header = ["row", "m", "s a step", "speed-up", "bound", "share, %", "tutorial"]
    same = _like_the_tutorial(found.results["config"])
    return Table(header, [_cells(row, facts, _published(row) if same else NONE) for row, facts in found.measured])


def _like_the_tutorial(config: Facts) -> bool:
    net = (config["net"]["init_args"] or {}).get("name")
    return (net, config["batch_size"], config["image_size"], config["num_classes"]) == ("resnet50", 120, 128, 1000)


def _cells(row: Row, facts: Facts, published: str) -> list[str]:
    bound, share = facts["bubble_bound"], facts["share_of_bound"]
    return [
        row.name,
        str(facts["num_microbatches"]),
        _spread(facts["seconds_per_step"]),
        f"{facts['speedup']:.2f}",
        NONE if bound is None else f"{bound:.2f}",
        NONE if share is None else f"{100 * share:.0f}",
        published,
    ]


def _spread(seconds: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(seconds):.2g}" if len(seconds) > 1 else ""
    return f"{short(statistics.mean(seconds))}{spread}"


def _published(row: Row) -> str:
    seconds = PUBLISHED.get((row.kind, None if row.num_microbatches == 1 else row.size))
    if seconds is None or row.schedule not in {None, *ONE_STAGE}:  # the tutorial has one stage on a device
        return NONE
    return f"{seconds / PUBLISHED_STEPS:.2f}, {PUBLISHED['one', None] / seconds:.2f} x"


def notes(found: Found) -> list[str]:
    """What stands beneath the table."""
    return [COLUMNS, SOURCE, NORM, *(f"{name}: {reason}." for name, reason in found.missing.items())]


# What to take


def advice(found: Found, fence: str = "") -> list[str]:
    """The fastest of all pipelines as options of any experiment and as code, and what else is as fast.

    Args:
        found: what was measured.
        fence: stands around what can be pasted.
    """
    there = {row.name: (row, _mean(facts)) for row, facts in found.measured if row.kind == "pipelined"}
    if not there:
        return []
    row, mean = min(there.values(), key=lambda each: each[1])
    options = {
        "schedule": row.schedule,
        "num_microbatches": row.num_microbatches,
        "balance": found.timelines[row.name]["sizes"],
    }
    flags = [f"--trainer.strategy.{name} {value}".replace(", ", ",") for name, value in options.items()]
    command = " ".join([f"--trainer.devices {row.devices} --trainer.strategy pipeline", *flags])
    code = f"PipelineStrategy({', '.join(f'{name}={value!r}' for name, value in options.items())})"
    by_time = [each for each in there.values() if each[0].cut is not None and each[0].cut.balance == "time"]
    said = [f"Recommended on this machine: {row.name}, {short(mean)} s a step.", *_as_fast(found, row, mean)]
    if by_time:
        chosen, _ = min(by_time, key=lambda each: (each[0].schedule != row.schedule, each[1]))
        sizes = found.timelines[chosen.name]["sizes"]
        said.append(f"By time the stages of {chosen.schedule} get {listed([str(size) for size in sizes])} layers.")
    blocks = [fence, command, fence], [fence and f"{fence}python", code, fence]
    return [paragraph(" ".join(said)), *("\n".join(filter(None, block)) for block in blocks)]


def _as_fast(found: Found, row: Row, mean: float) -> list[str]:
    """What else could be recommended."""
    spread = next(statistics.pstdev(facts["seconds_per_step"]) for each, facts in found.measured if each is row)
    near = [
        each.name
        for each, facts in found.measured
        if each.kind == "pipelined" and each is not row and _mean(facts) <= mean + spread
    ]
    plain = [(_mean(facts), each.name) for each, facts in found.measured if each.kind in {"one", "split"}]
    best = min(plain, default=(mean, ""))
    said = [f"Within a standard deviation of it: {'; '.join(near)}."] if near else []
    return [*said, f"No pipeline is faster than {best[1]}."] if best[0] < mean else said


def _mean(facts: Facts) -> float:
    return statistics.mean(facts["seconds_per_step"])
