"""Nets of equal cost: the width of each is scaled to the first one's parameters, or operations a token."""

import math
from argparse import Namespace
from collections.abc import Callable
from typing import Literal

from apprentice.errors import BadInput
from harness import cli
from harness.runs.quiet import notice
from harness.runs.session import Session
from harness.studies.choices import make_net
from harness.studies.text.costs import training_flops

Budget = Literal["parameters", "flops"]
WIDTH, HEADS = "embed_dim", "num_heads"
TOLERANCE = 0.1  # of the budget, by which a net may miss it
STEPS = (1, 2, 4, 8)  # widths are multiples of the heads' number by one of these, the first that the net takes
MOST = 2**16  # of a width


def scale_widths(session: Session, key: str, names: list[str], budget: Budget) -> None:
    """Replace, in a run's settings, the width of each net at `key` but the first of `names` by one of equal cost.

    A net keeps its other options, the number of its heads among them: the width is the multiple of this number with the
    nearest cost, so that heads become wider or narrower.

    Raises:
        BadInput: a net has no such options, or no operations that can be counted, or none of its widths comes close.
    """
    first, *others = names
    chosen: dict[str, cli.Choice] = dict(vars(session.config)[key])
    target = _cost(session, f"{key}.{first}", chosen[first], budget)
    if target is None:
        expected = f"parameters: operations of {chosen[first].name} can't be counted"
        raise BadInput("equal", budget, expected)
    for name in others:
        choice, flag = chosen[name], f"{key}.{name}"
        if not {WIDTH, HEADS} <= choice.signature.hints.keys():
            expected = f"variants with {WIDTH} and {HEADS}, as GPT; {name} is {choice.name}"
            raise BadInput("equal", budget, expected)
        width, cost = _nearest(session, flag, choice, budget, target)
        difference = cost / target - 1
        if abs(difference) > TOLERANCE:
            expected = f"variants that can have about {target:,.0f} {budget}{' a token' * (budget == 'flops')}, as"
            raise BadInput("equal", budget, f"{expected} {first}; {name} has {cost:,.0f} at {WIDTH} {width}")
        before = choice.init_args[WIDTH]
        notice(f"equal {budget}: {name} has {WIDTH} {width} in place of {before}, {100 * difference:+.1f} %")
        chosen[name] = with_width(choice, width)
    session.config = Namespace(**{**vars(session.config), key: chosen})


def with_width(choice: cli.Choice, width: int) -> cli.Choice:
    """Return a net's choice with another width."""
    return cli.Choice(choice.class_path, {**choice.init_args, WIDTH: width})


def _nearest(session: Session, flag: str, choice: cli.Choice, budget: Budget, target: float) -> tuple[int, float]:
    """Return the width with the nearest cost, and this cost; costs rise with widths."""
    step = _find_step(
        lambda width: _cost(session, flag, with_width(choice, width), "parameters"), choice.init_args[HEADS]
    )
    costs: dict[int, float] = {}

    def cost(number: int) -> float:
        if number not in costs:
            value = _cost(session, flag, with_width(choice, number * step), budget)
            if value is None:
                raise BadInput("equal", budget, f"parameters: operations of {choice.name} can't be counted")
            costs[number] = value
        return costs[number]

    low, high = 0, 1
    while cost(high) < target and high * step < MOST:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) < target else (low, middle)
    number = min([high, *([low] if low else [])], key=lambda number: abs(cost(number) - target))
    return number * step, costs[number]


def _find_step(cost: Callable[[int], float | None], heads: int) -> int:
    """Return the least multiple of the number of heads of which all multiples are widths that the net takes."""
    for factor in STEPS:
        try:
            cost(factor * heads)
            cost(3 * factor * heads)
        except BadInput:
            if factor == STEPS[-1]:
                raise
        else:
            return factor * heads
    return heads


def _cost(session: Session, flag: str, choice: cli.Choice, budget: Budget) -> float | None:
    key, _, name = flag.partition(".")
    settings = Namespace(**{key: {name: choice}})
    net = make_net(settings, flag, session.config.seeds[0], session.data.net_arguments)
    if budget == "parameters":
        return float(sum(p.numel() for p in net.parameters()))
    cost = training_flops(net, session.data)
    return cost if cost is None or math.isfinite(cost) else None
