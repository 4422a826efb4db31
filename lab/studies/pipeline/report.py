"""The report on pipelines: table, notes, pictures, and what to take for this machine."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from harness import cli
from harness.reports.figures import GREY, Axes, figure
from harness.reports.report import Code, Part, Report, machine, percent
from harness.reports.tables import NONE, Table, columns, join_words, paragraph, short
from harness.studies.study import StudyHeader
from lab.studies.pipeline.cases import BY_TIME, ONE_STAGE, Case
from lab.studies.pipeline.measure import Event, StepTiming, Timeline

Measured = Sequence[tuple[Case, StepTiming]]  # cases with their rows
KINDS = {"one": "C7", "split": "C3", "pipelined": "C0"}  # colours of cases
COLORS = {"forward": "C0", "backward": "C1", "weights": "C2"}
SHADES = (1.0, 0.6, 0.8, 0.4)  # of a rank's stages
READABLE = 0.011  # of the picture's width: a number has room in it
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
SPEED = "![seconds a step, and speed-up against the size of micro-batches](results.png)"
TIMELINE = "![who computes what when in a step](timeline.png)"


def mean_seconds(row: StepTiming) -> float:
    """Return the mean seconds of a step."""
    return statistics.mean(row["seconds_per_step"])


def report(
    header: StudyHeader,
    rows: Sequence[StepTiming],
    timelines: Mapping[str, Timeline],
    cases: Mapping[str, Case],
    size: int | None,
    missing: Mapping[str, str],
) -> Report:
    """Build the report from results.json's content, the cases' timelines, and the reasons why others are missing.

    `size` is the fastest size of micro-batches under the strategy's own schedule.
    """
    config, by_name = header["config"], {row["name"]: row for row in rows}
    measured = [(case, by_name[name]) for name, case in cases.items() if name in by_name]
    sizes, net = f"{config['batch_size']} images of 3 x {config['image_size']} x {config['image_size']}", config["net"]
    options = ", ".join(f"{name} {value}" for name, value in (net["init_args"] or {}).items() if value is not None)
    lines = {
        "Net": f"{net['class_path'].rpartition('.')[2]} ({options})",
        "Step": f"{sizes}, {config['num_classes']} classes, mean squared error to one-hot labels, SGD 0.001",
        "Repeats": f"{config['repeats']} of {config['batches']} steps, after two that are not timed",
        **machine(header),
    }
    text: list[Part] = [table(config, measured), COLUMNS, SOURCE, NORM]
    text += [f"{name}: {why}." for name, why in missing.items()]
    images, pngs, recommendation = [SPEED], {"results.png": speed(measured)}, advice(measured, timelines)
    names = [case.name for case, _ in measured if case.kind == "split" or case.size == size]
    if steps := {name: timelines[name] for name in names if name in timelines}:
        images.append(TIMELINE)
        pngs["timeline.png"] = timeline(steps)
    return Report(lines, [*text, *recommendation], [*text, *images, *recommendation], pngs)


def table(config: Mapping[str, Any], measured: Measured) -> Table:
    """Make a table with a line for each case."""
    net = (config["net"]["init_args"] or {}).get("name")
    sizes = config["batch_size"], config["image_size"], config["num_classes"]
    is_tutorials = (net, *sizes) == ("resnet50", 120, 128, 1000)
    cells = {
        "row": lambda pair: pair[0].name,
        "m": lambda pair: str(pair[1]["num_microbatches"]),
        "s a step": lambda pair: _seconds(pair[1]),
        "speed-up": lambda pair: f"{pair[1]['speedup']:.2f}",
        "bound": lambda pair: NONE if pair[1]["bubble_bound"] is None else f"{pair[1]['bubble_bound']:.2f}",
        "share, %": lambda pair: percent(pair[1]["share_of_bound"]),
        "tutorial": lambda pair: _tutorials_figures(pair[0]) if is_tutorials else NONE,
    }
    return columns(cells, measured)


def _seconds(row: StepTiming) -> str:
    spread = f" ± {statistics.stdev(row['seconds_per_step']):.2g}" if len(row["seconds_per_step"]) > 1 else ""
    return short(mean_seconds(row)) + spread


def _tutorials_figures(case: Case) -> str:
    seconds = PUBLISHED.get((case.kind, None if case.num_microbatches == 1 else case.size))
    if seconds is None or case.schedule not in {None, *ONE_STAGE}:  # the tutorial has one stage on a device
        return NONE
    return f"{seconds / 3:.2f}, {PUBLISHED['one', None] / seconds:.2f} x"


def advice(measured: Measured, timelines: Mapping[str, Timeline]) -> list[Part]:
    """Recommend the fastest pipeline, as options of any experiment and as code; name others that are as fast."""
    pipelines = {case: row for case, row in measured if case.kind == "pipelined"}
    if not pipelines:
        return []
    means = {case: mean_seconds(row) for case, row in measured}
    case = min(pipelines, key=means.__getitem__)
    sizes = {name: steps["sizes"] for name, steps in timelines.items()}
    options = {"schedule": case.schedule, "num_microbatches": case.num_microbatches, "balance": sizes[case.name]}
    flags = {f"trainer.strategy.{name}": str(value).replace(", ", ",") for name, value in options.items()}
    command = " ".join(cli.argv_of({"trainer.devices": case.devices, "trainer.strategy": "pipeline", **flags}))
    code = f"PipelineStrategy({', '.join(f'{name}={value!r}' for name, value in options.items())})"
    sentences = [f"Recommended on this machine: {case.name}, {short(means[case])} s a step."]
    limit = means[case] + statistics.pstdev(pipelines[case]["seconds_per_step"])
    if near := [other.name for other in pipelines if other is not case and means[other] <= limit]:
        sentences.append(f"Within a standard deviation of it: {'; '.join(near)}.")
    plain = min((other for other in means if other.kind in {"one", "split"}), key=means.__getitem__, default=case)
    if means[plain] < means[case]:
        sentences.append(f"No pipeline is faster than {plain.name}.")
    if by_time := [other for other in pipelines if other.cut == BY_TIME]:
        best = min(by_time, key=lambda other: (other.schedule != case.schedule, means[other]))
        layers = join_words([str(size) for size in sizes[best.name]])
        sentences.append(f"By time the stages of {best.schedule} get {layers} layers.")
    return [paragraph(" ".join(sentences)), Code(command), Code(code, "python")]


def speed(measured: Measured) -> bytes:
    """Draw the seconds of a step of each case, and beside them the speed-up against the size of micro-batches."""
    with figure(14, max(4.5, 1.2 + 0.25 * len(measured))) as (canvas, png):
        axes, right = canvas.subplots(1, 2)
        axes.set_title("seconds a step, mean and standard deviation")
        for place, (case, row) in enumerate(measured):
            mean, spread = mean_seconds(row), statistics.pstdev(row["seconds_per_step"])
            axes.barh(place, mean, xerr=spread, height=0.7, color=KINDS[case.kind], ecolor=GREY)
            axes.annotate(f" {mean:.3g}", (mean + spread, place), va="center", fontsize=7)
        axes.set_yticks(range(len(measured)), [case.name for case, _ in measured], fontsize=8, parse_math=False)
        axes.set_ylim(len(measured) - 0.4, -0.6)
        axes.margins(x=0.1)
        _curve(right, measured)
    return png.getvalue()


def _curve(axes: Axes, measured: Measured) -> None:
    """Draw speed-ups of one schedule's pipelines, over one device with batches and with the same micro-batches."""
    axes.set_title("speed-up over one device")
    axes.set_xlabel("images of a micro-batch")
    pipelines = [(case, row) for case, row in measured if case.kind == "pipelined"]
    if not pipelines:
        return
    schedule = pipelines[0][0].schedule
    curve = sorted([pair for pair in pipelines if pair[0].schedule == schedule], key=lambda pair: pair[0].size)
    alone = {case.num_microbatches: mean_seconds(row) for case, row in measured if case.kind == "one"}
    for number, cut in enumerate(dict.fromkeys(case.cut.label for case, _ in curve if case.cut)):
        points = [(case, row) for case, row in curve if case.cut and case.cut.label == cut]
        sizes, color = [case.size for case, _ in points], f"C{number}"
        axes.plot(sizes, [row["speedup"] for _, row in points], "o-", color=color, label=f"{schedule} {cut}")
        same = [alone.get(case.num_microbatches, math.nan) / mean_seconds(row) for case, row in points]
        axes.plot(sizes, same, "o--", color=color, alpha=0.5, label="… over the same micro-batches")
    bound = {case.size: row["bubble_bound"] or math.nan for case, row in curve}
    axes.plot([*bound], [*bound.values()], ":", color=GREY, label="bubble bound, p m / (m + p - 1)")
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks(list(bound), [str(size) for size in bound])
    axes.minorticks_off()
    axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def timeline(timelines: Mapping[str, Timeline]) -> bytes:
    """Draw a panel for each case: a line for a rank, a block for a computation, white where the rank waits.

    On a GPU a block is the time in which kernels are queued.
    """
    by_name = {name: [Event(*event) for event in timeline["events"]] for name, timeline in timelines.items()}
    all_events = [event for events in by_name.values() for event in events]
    longest, ranks = max(event.stop for event in all_events), 1 + max(event.rank for event in all_events)
    with figure(13, 0.8 + len(timelines) * (0.55 + 0.3 * ranks)) as (canvas, png):
        panels = canvas.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, events) in zip(panels, by_name.items(), strict=True):
            _draw_step(axes, events, longest)
            title = f"{name}: ranks wait for {100 * idle_share(events):.0f} %"
            axes.set_title(title, fontsize=9, color="black", loc="left", parse_math=False)
            axes.grid(False)
        meaning = "numbers are micro-batches, shades the stages of a rank"
        panels[-1].set_xlabel(f"seconds since the step's first forward; {meaning}")
        kinds = dict.fromkeys(event.kind for event in all_events)
        handles = [panels[0].barh(0, 0, color=COLORS[kind], label=kind) for kind in kinds]
        canvas.legend(handles=handles, loc="outside upper right", ncols=len(kinds))
    return png.getvalue()


def _draw_step(axes: Axes, events: Sequence[Event], longest: float) -> None:
    ranks = 1 + max(event.rank for event in events)
    stages = {rank: sorted({event.stage for event in events if event.rank == rank}) for rank in range(ranks)}
    for rank, stage, microbatch, kind, start, stop in events:
        shade = SHADES[stages[rank].index(stage) % len(SHADES)]
        look: dict[str, Any] = {"color": COLORS[kind], "alpha": shade, "edgecolor": "white", "linewidth": 0.3}
        axes.barh(rank, stop - start, 0.84, start, **look)
        if stop - start > READABLE * longest:
            axes.text((start + stop) / 2, rank, str(microbatch), ha="center", va="center", fontsize=6, color="white")
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_xlim(0, longest)


def idle_share(events: Sequence[Event]) -> float:
    """Return the mean over ranks of the share of a step, first to last computation, in which a rank is idle."""
    num_ranks = len({event.rank for event in events})
    busy = sum(event.stop - event.start for event in events)
    return 1 - busy / (num_ranks * (max(event.stop for event in events) - min(event.start for event in events)))
