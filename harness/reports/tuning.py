"""What a search of settings found: which were chosen, what they gained, what it cost, how sensitive each method is."""

import math
from collections.abc import Sequence
from statistics import mean
from typing import Any

from harness.reports.figures import GREY, figure
from harness.reports.report import Facts
from harness.reports.tables import NONE, Table, columns, count, listed, short, words
from harness.reports.uncertainty import expected_maximum
from lit_modules.tasks import METRICS, Metric

PICTURE = "tuning.png"
FACTOR = 9.0  # between the least and the greatest value of an option, from which its axis is logarithmic


def table(results: Facts) -> Table:
    """A line for each method: the chosen settings, and the validation of the given ones and of these.

    That of the chosen ones is there twice: as the search saw it, and with the table's seeds, which chose nothing.
    """
    metric, rows = METRICS[results["metric"]["name"]], [{"name": name, **found} for name, found in _found(results)]

    def scored(setting: Facts) -> str:
        value, ended = _mean(setting["validation"]), _epochs(setting["epochs"])
        return "failed" if value is None else f"{metric.scale * value:.{metric.digits}f} after {ended}"

    def again(row: Facts) -> str:
        seeds = results["students"][row["name"]].get("epochs") or [None]
        value = _mean([metric.last(epochs or []) for epochs in seeds])
        return NONE if value is None else f"{metric.scale * value:.{metric.digits}f}"

    cells = {
        "tuned": lambda row: row["name"],
        "chosen settings": lambda row: words(
            {name: _shown(value) for name, value in row["settings"][row["chosen"]]["options"].items()}
        ) + (", as given" if row["chosen"] == 0 else ""),
        f"validation, {metric.unit}" if metric.scale == 1 else "validation, %": (
            lambda row: scored(row["settings"][row["chosen"]])
        ),
        "again, %" if metric.scale == 100 else f"again, {metric.unit}": again,
        "as given": lambda row: scored(row["settings"][0]),
        "settings": lambda row: count(len(row["settings"])),
        "student-epochs": lambda row: count(results["tuning_cost"]["student_epochs"][row["name"]]),
    }  # fmt: skip
    return columns(cells, rows, left=2)


def notes(results: Facts) -> list[str]:
    """How the search was made and what it cost; nothing for a run without one."""
    if "tuning" not in results:
        return []
    cost, config = results["tuning_cost"], results["config"]
    seeds, rows = config["tune_seeds"], list(results["tuning"])
    most = max(len(entry["settings"]) for _, entry in _found(results))
    with_seeds = f"seed{'s' * (len(seeds) > 1)} {listed([str(seed) for seed in seeds])}"
    compared = f"Settings of {listed(rows)} were compared on the validation set with {with_seeds}, not in the table"
    *early, last = results.get("tuning_rungs", [0])
    after = listed([str(epochs) for epochs in early])
    how = f"; after {after} of {_epochs(last)} the better half of each went on" if early else ""
    runs = f" in all {len(results['pooled'])} runs together" if len(results.get("pooled", ())) > 1 else ""
    spent = f"{count(sum(cost['student_epochs'].values()))} student-epochs in {short(cost['fit_seconds'])} s"
    taught = ""
    if epochs := cost.get("teacher_epochs", 0):  # older versions did not count them
        taught = f", and {_epochs(epochs)} of its teachers in {short(cost['teacher_fit_seconds'])} s"
    teachers = f"Teachers computed {count(cost['teacher_samples'])} samples for students"
    saving = f"{teachers}; for each setting by itself it would have been {count(cost['teacher_samples_alone'])}"
    best = (
        f"The validation of chosen settings is the best of {most}, so it is too good: of {most} equal settings the "
        f"best is expected {expected_maximum(most):.2f} standard deviations above their mean. `again` is that of the "
        "table's seeds, which chose nothing. Methods compare by the test."
    )
    return [f"{compared}{how}.", best, f"The search took{runs} {spent}{taught}. {saving}."]


def picture(results: Facts) -> bytes:
    """A PNG: for each method the validation against each option; the chosen setting has a ring, dropped ones pale."""
    metric, found = METRICS[results["metric"]["name"]], _found(results)
    widest = max(len(entry["settings"][0]["options"]) for _, entry in found) or 1
    with figure(2.6 * widest + 0.6, 2.3 * len(found) + 0.3) as (drawn, png):
        grid = drawn.subplots(len(found), widest, squeeze=False, sharey="row")
        for axes_of_row, (name, entry) in zip(grid, found, strict=True):
            names = list(entry["settings"][0]["options"])
            for axes, option in zip(axes_of_row, names, strict=False):
                _sensitivity(axes, entry, option, metric)
            for axes in axes_of_row[len(names) :]:
                axes.set_axis_off()
            axes_of_row[0].set_title(f"{name}: validation {metric.word}", loc="left")
    return png.getvalue()


def _sensitivity(axes: Any, entry: Facts, option: str, metric: Metric) -> None:
    settings, most = entry["settings"], max(setting["epochs"] for setting in entry["settings"])
    values = [setting["options"][option] for setting in settings]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        places: Sequence[Any] = values
        above = [value for value in values if value > 0]
        if above and max(above) > FACTOR * min(above):
            # Zero is as far from the least value as that is from the middle of the others: ticks are evenly spaced.
            wide = math.log10(max(above) / min(above)) / 2
            zero = {"linthresh": min(above), "linscale": wide} if min(values) <= 0 else {}
            axes.set_xscale("symlog" if zero else "log", **zero)
            ticks = [*([0.0] if zero else []), min(above), math.sqrt(min(above) * max(above)), max(above)]
            axes.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
            axes.minorticks_off()
    else:
        places = [_shown(value) for value in values]
    for number, (setting, place) in enumerate(zip(settings, places, strict=True)):
        height = _mean(setting["validation"])
        if height is None:
            continue
        ringed = number == entry["chosen"]
        axes.scatter(
            [place], [metric.scale * height], s=70 if ringed else 26, zorder=3, marker="s" if number == 0 else "o",
            color="C0", alpha=0.25 + 0.75 * setting["epochs"] / most, edgecolors="black" if ringed else "white",
        )  # fmt: skip
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set_xlabel(option, color=GREY)


def _epochs(number: int) -> str:
    return f"{count(number)} epoch{'s' * (number != 1)}"


def _found(results: Facts) -> list[tuple[str, Facts]]:
    return list(results["tuning"].items())


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known and len(known) == len(values) else None


def _shown(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    return NONE if value is None else str(value)
