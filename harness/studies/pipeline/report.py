"""The report on pipelines: table, notes, pictures, and what to take for this machine."""

import statistics
from collections.abc import Mapping, Sequence

from harness.reports.report import Code, Facts, Part, Report, machine, percent
from harness.reports.tables import NONE, Table, columns, listed, paragraph, short
from harness.studies.pipeline import figures
from harness.studies.pipeline.cases import BY_TIME, ONE_STAGE, Case
from harness.studies.pipeline.figures import Measured, mean_seconds

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
# The tutorial's figures: kind of case and images of a micro-batch, None for whole batches; seconds for three steps.
PUBLISHED = {("one", None): 3.75, ("split", None): 4.02, ("pipelined", 20): 2.51, ("pipelined", 12): 2.43}
PUBLISHED_STEPS = 3
SPEED = "![seconds a step, and speed-up against the size of micro-batches](results.png)"
TIMELINE = "![who computes what when in a step](timeline.png)"


def report(
    results: Facts, timelines: Mapping[str, Facts], cases: Sequence[Case], best: Case | None, missing: Mapping[str, str]
) -> Report:
    """Build the report from results.json's content, the cases' timelines, and the reasons why others are missing.

    `best` is the fastest of the pipelines under the strategy's own schedule.
    """
    rows = {row["name"]: row for row in results["rows"]}
    measured = [(case, rows[case.name]) for case in cases if case.name in rows]
    notes = [COLUMNS, SOURCE, NORM, *(f"{name}: {why}." for name, why in missing.items())]
    text: list[Part] = [table(results["config"], measured), *notes]
    images, pngs = [SPEED, *([TIMELINE] if timelines else [])], {"results.png": figures.speed(measured)}
    size = None if best is None else best.size
    shown = [case.name for case, _ in measured if case.kind == "split" or case.size == size]
    if drawn := {name: timelines[name] for name in shown if name in timelines}:
        pngs["timeline.png"] = figures.timelines(drawn)
    advised = advice(measured, timelines)
    return Report(_header(results), [*text, *advised], [*text, *images, *advised], pngs)


def _header(results: Facts) -> dict[str, str]:
    config = results["config"]
    sizes = f"{config['batch_size']} images of 3 x {config['image_size']} x {config['image_size']}"
    net = config["net"]
    options = ", ".join(f"{name} {value}" for name, value in (net["init_args"] or {}).items() if value is not None)
    return {
        "Net": f"{net['class_path'].rpartition('.')[2]} ({options})",
        "Step": f"{sizes}, {config['num_classes']} classes, mean squared error to one-hot labels, SGD 0.001",
        "Repeats": f"{config['repeats']} of {config['batches']} steps, after two that are not timed",
        **machine(results),
    }


def table(config: Facts, measured: Measured) -> Table:
    """One line a case."""
    net = (config["net"]["init_args"] or {}).get("name")
    sizes = config["batch_size"], config["image_size"], config["num_classes"]
    same = (net, *sizes) == ("resnet50", 120, 128, 1000)
    cells = {
        "row": lambda each: each[0].name,
        "m": lambda each: str(each[1]["num_microbatches"]),
        "s a step": lambda each: short(mean_seconds(each[1])) + _spread(each[1]["seconds_per_step"]),
        "speed-up": lambda each: f"{each[1]['speedup']:.2f}",
        "bound": lambda each: NONE if each[1]["bubble_bound"] is None else f"{each[1]['bubble_bound']:.2f}",
        "share, %": lambda each: percent(each[1]["share_of_bound"]),
        "tutorial": lambda each: _published(each[0]) if same else NONE,
    }
    return columns(cells, measured)


def _spread(seconds: Sequence[float]) -> str:
    return f" ± {statistics.stdev(seconds):.2g}" if len(seconds) > 1 else ""


def _published(case: Case) -> str:
    seconds = PUBLISHED.get((case.kind, None if case.num_microbatches == 1 else case.size))
    if seconds is None or case.schedule not in {None, *ONE_STAGE}:  # the tutorial has one stage on a device
        return NONE
    return f"{seconds / PUBLISHED_STEPS:.2f}, {PUBLISHED['one', None] / seconds:.2f} x"


def advice(measured: Measured, timelines: Mapping[str, Facts]) -> list[Part]:
    """The fastest pipeline as options of any experiment and as code, and what else is as fast."""
    pipelines = {case: row for case, row in measured if case.kind == "pipelined"}
    if not pipelines:
        return []
    means = {case: mean_seconds(row) for case, row in measured}
    case = min(pipelines, key=means.__getitem__)
    options = {
        "schedule": case.schedule,
        "num_microbatches": case.num_microbatches,
        "balance": timelines[case.name]["sizes"],
    }
    flags = [f"--trainer.strategy.{name} {value}".replace(", ", ",") for name, value in options.items()]
    command = " ".join([f"--trainer.devices {case.devices} --trainer.strategy pipeline", *flags])
    code = f"PipelineStrategy({', '.join(f'{name}={value!r}' for name, value in options.items())})"
    sentences = [f"Recommended on this machine: {case.name}, {short(means[case])} s a step."]
    limit = means[case] + statistics.pstdev(pipelines[case]["seconds_per_step"])
    if near := [other.name for other in pipelines if other is not case and means[other] <= limit]:
        sentences.append(f"Within a standard deviation of it: {'; '.join(near)}.")
    plain = min((other for other in means if other.kind in {"one", "split"}), key=means.__getitem__, default=case)
    if means[plain] < means[case]:
        sentences.append(f"No pipeline is faster than {plain.name}.")
    if by_time := [other for other in pipelines if other.cut == BY_TIME]:
        chosen = min(by_time, key=lambda other: (other.schedule != case.schedule, means[other]))
        sizes = [str(size) for size in timelines[chosen.name]["sizes"]]
        sentences.append(f"By time the stages of {chosen.schedule} get {listed(sizes)} layers.")
    return [paragraph(" ".join(sentences)), Code(command), Code(code, "python")]
