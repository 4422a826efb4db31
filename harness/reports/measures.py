"""The numbers that a record has of a net beside its scores: each declared once, with all that shows it."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import mean, median

from harness.reports.tables import NONE, count, short

Values = Sequence[float | None]  # one a seed; None where the net failed, or the number was not measured
Figures = Mapping[str, float | None]  # of a net, by key
FLOPS = ((1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"), (1e6, "MFLOPs"))


@dataclass(frozen=True)
class Figure:
    """A number of a net."""

    key: str  # its name in records and in results.json
    heading: str  # of its column; `{unit}` stands for the unit of all rows
    text: Callable[[float | None], str] = short  # writes a value
    combine: Callable[[list[float]], float] = median  # makes one value of those that are known of all seeds
    per_seed: bool = False  # whether results.json has the value of each seed, and not the combined one
    # Whether a net has it before it is trained: a failed one has it too, and its column precedes the scores.
    of_net: bool = False
    on_page: bool = False  # whether it is shown in a section of report.html, and not in the table
    optional: bool = False  # whether results.json, and a table, have it only where some net has one
    # Sizes and names of units, the largest first, of which one is chosen for all rows.
    units: Sequence[tuple[float, str]] = ((1.0, ""),)
    curve: str = ""  # its title in TensorBoard's HPARAMS tab, of the scalar `training_cost/<key>`; empty for none
    axis: str = ""  # the label of an axis of costs; empty for none

    def combine_known(self, values: Values) -> float | None:
        """Combine the values that are known."""
        known = [value for value in values if value is not None]
        return self.combine(known) if known else None

    def unit(self, values: Iterable[float | None]) -> tuple[float, str]:
        """Choose the size and the name of a unit that suits all values."""
        largest = max((value for value in values if value is not None), default=0.0)
        return next((unit for unit in self.units if largest >= unit[0]), self.units[-1])

    def column(self, rows: Sequence[Figures]) -> tuple[str, list[str]]:
        """Write its heading and its cells for rows of figures by key."""
        values = [row.get(self.key) for row in rows]
        size, unit = self.unit(values)
        return self.heading.format(unit=unit), [self.text(None if x is None else x / size) for x in values]


def to_digits(digits: int, scale: float = 1.0) -> Callable[[float | None], str]:
    """Write a value, scaled, with so many digits after the point."""
    return lambda value: NONE if value is None else f"{scale * value:.{digits}f}"


def to_count(value: float | None) -> str:
    """Write a whole number with separators."""
    return count(None if value is None else int(value))


def mean_count(values: Iterable[float]) -> float:
    """Return the mean as a whole number: seeds may train for other numbers of steps, or texts of other lengths."""
    return round(mean(values))


PARAMETERS = Figure(
    "parameters", "parameters", to_count, itemgetter(0), of_net=True, curve="parameters", axis="parameters"
)
STEP = Figure("step_ms", "step, ms", curve="ms a step", axis="own training step, ms")
COST = Figure(
    "train_flops", "cost, {unit}", combine=mean_count, units=FLOPS, curve="FLOPs of training",
    axis="cost of training, {unit}",
)  # fmt: skip
FIGURES = (  # in the order of a table's columns
    PARAMETERS,
    STEP,
    COST,
    Figure("flops_token", "{unit} a token", combine=itemgetter(0), units=FLOPS, optional=True),
    Figure("tokens_per_second", "tokens/s", optional=True),
    Figure("test_agreement", "agreement with the teacher, %", to_digits(2, 100), mean, per_seed=True, on_page=True),
    Figure("test_kl", "KL to the teacher, nats", to_digits(4), mean, per_seed=True, on_page=True),
    Figure("test_generated", "score of answers", to_digits(3), mean, per_seed=True, on_page=True),
    Figure("test_loss_window", "loss, window alone", to_digits(3), mean, per_seed=True, on_page=True),
    Figure("test_loss_linear", "loss, linear part alone", to_digits(3), mean, per_seed=True, on_page=True),
    Figure("test_knn", "20 nearest neighbours, %", to_digits(2, 100), mean, per_seed=True, on_page=True),
    Figure("test_probe", "linear probe, %", to_digits(2, 100), mean, per_seed=True, on_page=True),
    Figure("test_ndcg_teacher", "nDCG@10 among the teacher's, %", to_digits(2, 100), mean, per_seed=True, on_page=True),
    Figure("test_rerank", "MRR in a row, %", to_digits(2, 100), mean, per_seed=True, on_page=True),
    Figure("test_ece", "ECE, %", to_digits(2, 100), mean, per_seed=True, on_page=True),
)
# Of a text's decoder with so many tokens in its cache, and of so many threads.
AT_LENGTH = re.compile(r"(decode_ms|cache_bytes)_(\d+)(_\d+)?")
ON_PAGE = tuple(figure for figure in FIGURES if figure.on_page)


def figures_of(keys: Iterable[str]) -> list[Figure]:
    """Return the figures that rows with these keys may have: those of every net, and those at lengths of a cache."""
    at_lengths = sorted({(int(found[2]), found[1], key) for key in keys if (found := AT_LENGTH.fullmatch(key))})
    others = [
        Figure(
            key,
            f"ms a token at {length:,} ({key.rpartition('_')[2]} threads)".replace("(1 threads", "(1 thread"),
            optional=True,
        )
        if kind == "decode_ms"
        else Figure(key, f"cache at {length:,}, bytes a token", optional=True)
        for length, kind, key in at_lengths
    ]
    return [*FIGURES, *others]


def in_table(rows: Sequence[Figures]) -> list[Figure]:
    """Return the figures of a table with these rows: those of each net, and others that some row has."""
    figures = figures_of(key for row in rows for key in row)
    has = {figure.key for figure in figures if any(row.get(figure.key) is not None for row in rows)}
    return [figure for figure in figures if not figure.on_page and (figure.key in has or not figure.optional)]


def columns_on_page(rows: Sequence[Figures], keys: Collection[str] | None = None) -> list[tuple[str, list[str]]]:
    """Write the columns of figures of a page's section, or of `keys` among them, that some row has."""
    figures = (figure for figure in ON_PAGE if keys is None or figure.key in keys)
    return [figure.column(rows) for figure in figures if any(row.get(figure.key) is not None for row in rows)]


def cost_of(nets: Iterable[Figures]) -> Figure:
    """Choose the cost that nets are compared by: FLOPs of training, or milliseconds a step where none has them."""
    return STEP if all(net.get(COST.key) is None for net in nets) else COST


def axis(cost: Figure, nets: Sequence[Figures]) -> tuple[str, list[float | None]]:
    """Label an axis of a cost, and return the nets' values in its unit."""
    values = [net.get(cost.key) for net in nets]
    size, unit = cost.unit(values)
    return cost.axis.format(unit=unit), [None if value is None else value / size for value in values]
