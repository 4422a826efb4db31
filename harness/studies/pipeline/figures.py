"""Pictures of the study: the speed of each case, the effect of micro-batches' size, and timelines."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.reports.figures import GREY, figure
from harness.reports.report import Facts
from harness.studies.pipeline.cases import Case

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Measured = Sequence[tuple[Case, Facts]]  # cases with their rows
COLORS = {"forward": "C0", "backward": "C1", "weights": "C2"}
SHADES = (1.0, 0.6, 0.8, 0.4)  # of a rank's stages
READABLE = 0.011  # of the picture's width: a number has room in it


def mean_seconds(row: Facts) -> float:
    """Mean seconds of a step."""
    return statistics.mean(row["seconds_per_step"])


def speed(measured: Measured) -> bytes:
    """A PNG: left the seconds of a step of each case, right the speed-up against the size of micro-batches."""
    with figure(14, max(4.5, 1.2 + 0.25 * len(measured))) as (drawn, png):
        left, right = drawn.subplots(1, 2)
        _bars(left, measured)
        _curve(right, measured)
    return png.getvalue()


def _bars(axes: "Axes", measured: Measured) -> None:
    colors = {"one": "C7", "split": "C3", "pipelined": "C0", "inside": "C4"}
    axes.set_title("seconds a step, mean and standard deviation")
    means = [mean_seconds(row) for _, row in measured]
    spreads = [statistics.pstdev(row["seconds_per_step"]) for _, row in measured]
    places = range(len(measured))
    axes.barh(places, means, xerr=spreads, height=0.7, color=[colors[case.kind] for case, _ in measured], ecolor=GREY)
    for place, mean, spread in zip(places, means, spreads, strict=True):
        axes.annotate(f" {mean:.3g}", (mean + spread, place), va="center", fontsize=7)
    axes.set_yticks(places, [case.name for case, _ in measured], fontsize=8, parse_math=False)
    axes.set_ylim(len(measured) - 0.4, -0.6)
    axes.margins(x=0.1)


def _curve(axes: "Axes", measured: Measured) -> None:
    """Speed-ups of the pipelines of one schedule, over one device with batches and with the same micro-batches."""
    axes.set_title("speed-up over one device")
    axes.set_xlabel("images of a micro-batch")
    pipelines = [(case, row) for case, row in measured if case.kind == "pipelined"]
    if not pipelines:
        return
    schedule = pipelines[0][0].schedule
    curve = sorted([pair for pair in pipelines if pair[0].schedule == schedule], key=lambda pair: pair[0].size)
    alone = {case.num_microbatches: mean_seconds(row) for case, row in measured if case.kind == "one"}
    for number, cut in enumerate(dict.fromkeys(case.cut.label for case, _ in curve if case.cut)):
        mine = [(case, row) for case, row in curve if case.cut and case.cut.label == cut]
        sizes, color = [case.size for case, _ in mine], f"C{number}"
        axes.plot(sizes, [row["speedup"] for _, row in mine], "o-", color=color, label=f"{schedule} {cut}")
        same = [alone.get(case.num_microbatches, math.nan) / mean_seconds(row) for case, row in mine]
        axes.plot(sizes, same, "o--", color=color, alpha=0.5, label="… over the same micro-batches")
    bound = {case.size: row["bubble_bound"] or math.nan for case, row in curve}
    axes.plot([*bound], [*bound.values()], ":", color=GREY, label="bubble bound, p m / (m + p - 1)")
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks(list(bound), [str(size) for size in bound])
    axes.minorticks_off()
    axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def timelines(timelines: Mapping[str, Facts]) -> bytes:
    """A PNG with a panel a case: a line a rank, a block a computation, white where the rank waits.

    On a GPU the blocks are when kernels are queued. See `Bench.measure` for a timeline's content.
    """
    every = [event for timeline in timelines.values() for event in timeline["events"]]
    longest, ranks = max(event[5] for event in every), 1 + max(event[0] for event in every)
    with figure(13, 0.8 + len(timelines) * (0.55 + 0.3 * ranks)) as (drawn, png):
        panels = drawn.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
            _timeline(axes, timeline["events"], longest)
            title = f"{name}: ranks wait for {100 * idle(timeline['events']):.0f} %"
            axes.set_title(title, fontsize=9, color="black", loc="left", parse_math=False)
            axes.grid(False)
        panels[-1].set_xlabel(
            "seconds since the step's first forward; numbers are micro-batches, shades the stages of a rank"
        )
        kinds = dict.fromkeys(event[3] for event in every)
        handles = [panels[0].barh(0, 0, color=COLORS[kind], label=kind) for kind in kinds]
        drawn.legend(handles=handles, loc="outside upper right", ncols=len(kinds))
    return png.getvalue()


def _timeline(axes: "Axes", events: Sequence[Sequence[Any]], longest: float) -> None:
    ranks = 1 + max(event[0] for event in events)
    stages = {rank: sorted({event[1] for event in events if event[0] == rank}) for rank in range(ranks)}
    for rank, stage, number, kind, start, stop in events:
        shade = SHADES[stages[rank].index(stage) % len(SHADES)]
        block: dict[str, Any] = {"facecolor": COLORS[kind], "alpha": shade, "edgecolor": "white", "linewidth": 0.3}
        axes.broken_barh([(start, stop - start)], (rank - 0.42, 0.84), **block)
        if stop - start > READABLE * longest:
            axes.text((start + stop) / 2, rank, str(number), ha="center", va="center", fontsize=6, color="white")
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_xlim(0, longest)


def idle(events: Sequence[Sequence[Any]]) -> float:
    """The share of a step, from the first computation to the last, in which a rank computes nothing; their mean."""
    ranks = {event[0] for event in events}
    busy = sum(stop - start for *_, start, stop in events)
    return 1 - busy / (len(ranks) * (max(e[5] for e in events) - min(e[4] for e in events)))
