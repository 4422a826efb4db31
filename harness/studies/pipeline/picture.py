"""Pictures of the study: how fast each row is, what the size of micro-batches does, and who computes what when."""

import io
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from harness.reports.figures import GREY
from harness.studies.pipeline.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Facts = dict[str, Any]
COLORS = {"forward": "C0", "backward": "C1", "weights": "C2"}
SHADES = (1.0, 0.6, 0.8, 0.4)  # of a rank's stages
READABLE = 0.011  # of the picture's width: a number has room in it


def speed(measured: Sequence[tuple[Row, Facts]]) -> bytes:
    """A PNG: left the seconds of a step of each row, right the speed-up against the size of micro-batches."""
    with _figure((14, max(4.5, 1.2 + 0.25 * len(measured)))) as (figure, buffer):
        left, right = figure.subplots(1, 2)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25, linewidth=0.6)
        _bars(left, measured)
        _curve(right, measured)
    return buffer.getvalue()


@contextmanager
def _figure(inches: tuple[float, float]) -> Iterator[tuple["Figure", io.BytesIO]]:
    """A figure of its own, and where its PNG is when the block has ended."""
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.style.context("default"):
        figure, buffer = Figure(figsize=inches, dpi=120, layout="constrained"), io.BytesIO()
        FigureCanvasAgg(figure)
        yield figure, buffer
        figure.savefig(buffer, format="png")


def _bars(axes: "Axes", measured: Sequence[tuple[Row, Facts]]) -> None:
    colors = {"one": "C7", "split": "C3", "pipelined": "C0", "inside": "C4"}
    means = [_mean(facts) for _, facts in measured]
    spreads = [statistics.pstdev(facts["seconds_per_step"]) for _, facts in measured]
    places = range(len(measured))
    axes.barh(places, means, xerr=spreads, height=0.7, color=[colors[row.kind] for row, _ in measured], ecolor=GREY)
    for place, mean, spread in zip(places, means, spreads, strict=True):
        axes.annotate(f" {mean:.3g}", (mean + spread, place), va="center", fontsize=7)
    axes.set_yticks(places, [row.name for row, _ in measured], fontsize=8, parse_math=False)
    axes.set_ylim(len(measured) - 0.4, -0.6)
    axes.margins(x=0.1)
    axes.set_title("seconds a step, mean and standard deviation", fontsize=10, color=GREY)


def _curve(axes: "Axes", measured: Sequence[tuple[Row, Facts]]) -> None:
    """Speed-ups of the pipelines of one schedule, over one device with batches and with the same micro-batches."""
    axes.set_title("speed-up over one device", fontsize=10, color=GREY)
    axes.set_xlabel("images of a micro-batch")
    pipelines = [(row, facts) for row, facts in measured if row.kind == "pipelined"]
    curve = [(row, facts) for row, facts in pipelines if row.schedule == pipelines[0][0].schedule]
    if not curve:
        return
    alone = {row.num_microbatches: _mean(facts) for row, facts in measured if row.kind == "one"}
    for number, cut in enumerate(dict.fromkeys(row.cut.label for row, _ in curve if row.cut is not None)):
        mine = [(row, facts) for row, facts in curve if row.cut is not None and row.cut.label == cut]
        same = [(row.size, alone.get(row.num_microbatches, math.nan) / _mean(facts)) for row, facts in mine]
        label, color = f"{curve[0][0].schedule} {cut}", f"C{number}"
        _line(axes, [(row.size, facts["speedup"]) for row, facts in mine], "o-", color=color, label=label)
        _line(axes, same, "o--", color=color, alpha=0.5, label="… over the same micro-batches")
    bound = {row.size: facts["bubble_bound"] or math.nan for row, facts in curve}
    _line(axes, list(bound.items()), ":", color=GREY, label="bubble bound, p m / (m + p - 1)")
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks(list(bound), [str(size) for size in bound])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _line(axes: "Axes", points: Sequence[tuple[float, float]], style: str, **look: Any) -> None:
    axes.plot(*zip(*sorted(points), strict=True), style, **look)


def _mean(facts: Facts) -> float:
    return statistics.mean(facts["seconds_per_step"])


# Who computes what when


def timelines(timelines: Mapping[str, Facts]) -> bytes:
    """A PNG with a panel a row: a line a rank, a block a computation, white where the rank waits.

    On a GPU the blocks are when kernels are queued.

    Args:
        timelines: by name of the row, its `events` (rank, stage, micro-batch, kind, start, stop).
    """
    longest = max(_stop(each) for each in timelines.values())
    ranks = max(1 + max(event[0] for event in each["events"]) for each in timelines.values())
    with _figure((13, 0.8 + len(timelines) * (0.55 + 0.3 * ranks))) as (figure, buffer):
        panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
            _timeline(axes, timeline["events"], longest)
            said = f"{name}: ranks wait for {100 * idle(timeline['events']):.0f} %"
            axes.set_title(said, fontsize=9, loc="left", parse_math=False)
        said = "seconds since the step's first forward; numbers are micro-batches, shades the stages of a rank"
        panels[-1].set_xlabel(said)
        kinds = dict.fromkeys(event[3] for each in timelines.values() for event in each["events"])
        handles = [panels[0].barh(0, 0, color=COLORS[kind], label=kind) for kind in kinds]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(kinds), frameon=False, fontsize=8)
    return buffer.getvalue()


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
    axes.spines[["top", "right"]].set_visible(False)


def _stop(timeline: Facts) -> float:
    return max(event[5] for event in timeline["events"])


def idle(events: Sequence[Sequence[Any]]) -> float:
    """The share of a step, from the first computation to the last, in which a rank computes nothing; their mean."""
    ranks = {event[0] for event in events}
    busy = sum(stop - start for *_, start, stop in events)
    return 1 - busy / (len(ranks) * (max(e[5] for e in events) - min(e[4] for e in events)))
