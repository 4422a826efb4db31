"""What a search of settings found: which were chosen, what they gained, what it cost, how sensitive each method is."""

import math
from collections.abc import Sequence
from typing import Any

from harness.reports.figures import GREY, figure
from harness.reports.results import Results, mean_of_all
from harness.reports.search import Search, SettingScores, TunedMethod
from harness.reports.tables import NONE, Table, count, join_words, short, table_of, words
from harness.reports.uncertainty import expected_maximum
from lit_modules.tasks import Metric

PICTURE = "tuning.png"
FACTOR = 9.0  # between the least and the greatest value of an option, from which its axis is logarithmic


def table(results: Results) -> Table:
    """Return a line for each method: the chosen settings, and the validation of the given ones and of these.

    That of the chosen ones is there twice: as the search saw it, and with the table's seeds, which chose nothing.
    """
    search, metric = search_of(results), results.metric

    def write_score(setting: SettingScores) -> str:
        value, ended = mean_of_all(setting.validation), _epochs(setting.epochs)
        return "failed" if value is None else f"{metric.scale * value:.{metric.digits}f} after {ended}"

    def write_retest(name: str) -> str:
        value = mean_of_all([metric.last(epochs or []) for epochs in results.students[name].epochs or [None]])
        return NONE if value is None else f"{metric.scale * value:.{metric.digits}f}"

    def write_options(tuned: TunedMethod) -> str:
        options = {name: _write_value(value) for name, value in tuned.settings[tuned.chosen].options.items()}
        return words(options) + (", as given" if tuned.chosen == 0 else "")

    methods = search.methods
    unit = metric.unit if metric.scale == 1 else "%"
    return table_of([
        ("tuned", list(methods)),
        ("chosen settings", [write_options(tuned) for tuned in methods.values()]),
        (f"validation, {unit}", [write_score(tuned.settings[tuned.chosen]) for tuned in methods.values()]),
        (f"again, {'%' if metric.scale == 100 else metric.unit}", [write_retest(name) for name in methods]),
        ("as given", [write_score(tuned.settings[0]) for tuned in methods.values()]),
        ("settings", [count(len(tuned.settings)) for tuned in methods.values()]),
        ("student-epochs", [count(search.cost.student_epochs[name]) for name in methods]),
    ], left=2)  # fmt: skip


def text(results: Results) -> str:
    """Write the table of a search and its notes in Markdown; nothing without one."""
    return "\n\n".join([table(results).markdown(), *notes(results)]) if results.search else ""


def notes(results: Results) -> list[str]:
    """Say how the search was made and what it cost; nothing for a run without one."""
    if results.search is None:
        return []
    search, cost, seeds = results.search, results.search.cost, results.config["tune_seeds"]
    most = max(len(tuned.settings) for tuned in search.methods.values())
    with_seeds = f"seed{'s' * (len(seeds) > 1)} {join_words([str(seed) for seed in seeds])}"
    compared = f"Settings of {join_words(list(search.methods))} were compared on the validation set with {with_seeds}"
    *early, last = search.rungs
    after = join_words([str(epochs) for epochs in early])
    how = f"; after {after} of {_epochs(last)} the better half of each went on" if early else ""
    runs = f" in all {len(results.pooled)} runs together" if len(results.pooled) > 1 else ""
    spent = f"{count(sum(cost.student_epochs.values()))} student-epochs in {short(cost.fit_seconds)} s"
    taught = ""
    if cost.teacher_epochs:
        taught = f", and {_epochs(cost.teacher_epochs)} of its teachers in {short(cost.teacher_fit_seconds)} s"
    teachers = f"Teachers computed {count(cost.teacher_samples)} samples for students"
    saving = f"{teachers}; for each setting by itself it would have been {count(cost.teacher_samples_alone)}"
    best = (
        f"The validation of chosen settings is the best of {most}, so it is too good: of {most} equal settings the "
        f"best is expected {expected_maximum(most):.2f} standard deviations above their mean. `again` is that of the "
        "table's seeds, which chose nothing. Methods compare by the test."
    )
    took = f"The search took{runs} {spent}{taught}."
    return [f"{compared}, not in the table{how}.", best, f"{took} {saving}." if results.teacher else took]


def search_of(results: Results) -> Search:
    """Return the search of a run that was tuned."""
    assert results.search is not None
    return results.search


def picture(results: Results) -> bytes:
    """Draw a PNG: each method's validation against each option; the chosen setting has a ring, dropped ones fade."""
    metric, methods = results.metric, search_of(results).methods
    widest = max(len(tuned.settings[0].options) for tuned in methods.values()) or 1
    with figure(2.6 * widest + 0.6, 2.3 * len(methods) + 0.3) as (drawn, png):
        grid = drawn.subplots(len(methods), widest, squeeze=False, sharey="row")
        for axes_of_row, (name, tuned) in zip(grid, methods.items(), strict=True):
            names = list(tuned.settings[0].options)
            for axes, option in zip(axes_of_row, names, strict=False):
                _sensitivity(axes, tuned, option, metric)
            for axes in axes_of_row[len(names) :]:
                axes.set_axis_off()
            axes_of_row[0].set_title(f"{name}: validation {metric.word}", loc="left")
    return png.getvalue()


def _sensitivity(axes: Any, tuned: TunedMethod, option: str, metric: Metric) -> None:
    settings, most = tuned.settings, max(setting.epochs for setting in tuned.settings)
    values = [setting.options[option] for setting in settings]
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
        places = [_write_value(value) for value in values]
    for number, (setting, place) in enumerate(zip(settings, places, strict=True)):
        height = mean_of_all(setting.validation)
        if height is None:
            continue
        ringed = number == tuned.chosen
        axes.scatter(
            [place], [metric.scale * height], s=70 if ringed else 26, zorder=3, marker="s" if number == 0 else "o",
            color="C0", alpha=0.25 + 0.75 * setting.epochs / most, edgecolors="black" if ringed else "white",
        )  # fmt: skip
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set_xlabel(option, color=GREY)


def _epochs(number: int) -> str:
    return f"{count(number)} epoch{'s' * (number != 1)}"


def _write_value(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    return NONE if value is None else str(value)
