"""The settings of a method that are tried: those that were given, then points of a scrambled Sobol sequence."""

import functools
import math
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import yaml
from torch import nn

from apprentice.errors import BadInput
from harness import cli
from harness.cli.messages import near
from harness.cli.sources import read_value
from harness.reports.tables import join_words
from harness.runs.arm_names import choice_at
from harness.runs.plans import Arm
from harness.runs.training_options import scheduler_factory
from harness.studies.kinds import task_of_choice
from lit_modules.nets.outputs import CLASSES
from lit_modules.objectives.base import Objective
from lit_modules.objectives.search import Choice, Linear, Log, Space
from lit_modules.schedules import build_scheduler, nominal
from lit_modules.tasks import task_class

OPTIMIZER, MODEL, SEARCH = "optimizer", "model", "search"
OF_MODEL = ("lr", "weight_decay")  # options of a module that makes its optimizer itself
AROUND = 10.0  # the learning rate is searched from a tenth of the given one to ten times it
DECAY = Log(1e-6, 1e-2)
FORMS: Mapping[str, type[Log | Linear]] = {"log": Log, "linear": Linear}
FORM = re.compile(r"(log|linear)\(([^,()]+),([^,()]+)\)")
EXPECTED = "log(LOW, HIGH) above 0, linear(LOW, HIGH), one value, or a list of them, as [1, 2, 4]"
POINTS_FOR_ONE = 64  # that are drawn at most for a setting that differs from those before
DIMENSIONS = 64  # of every sequence: the scrambling of a dimension depends on how many there are


def parse(value: Any, flag: str) -> Space:
    """Parse the space that a flag's value describes; BadInput if it describes none."""
    text, value = value, read_value(value, flag)
    form = FORM.fullmatch(value.strip()) if isinstance(value, str) else None
    try:
        if form:
            low, high = float(form[2]), float(form[3])
            if not (-math.inf < low < high < math.inf and (form[1] == "linear" or low > 0)):
                raise ValueError
            return FORMS[form[1]](low, high)
        items = value if isinstance(value, list) else [value]
        values = [yaml.safe_load(item) if isinstance(item, str) else item for item in items]
    except (ValueError, yaml.YAMLError):
        raise BadInput(flag, text, EXPECTED) from None
    if not values or any(isinstance(item, dict) or item is None or "(" in str(item) for item in values):
        raise BadInput(flag, text, EXPECTED)
    return Choice(tuple(tuple(item) if isinstance(item, list) else item for item in values))


def spaces(config: Namespace, arm: Arm) -> dict[str, Space]:
    """Return the space of each option of a row; those of the optimizer are named `optimizer.lr` and so on.

    The optimizer's come first, in the same order for every row: they get the same points whatever a method adds.
    An option that is for other outputs than the data's is left out.
    """
    method = cast("type[Objective]", arm.method.target)
    shared: dict[str, Space] = _optimizer_spaces(config) if config.tune_optimizer else {}
    of_method: dict[str, Space] = dict(method.search) if rates_key(config) == OPTIMIZER else {}
    if (task := task_of_choice(config.data)) and (outputs := task_class(task).outputs) != CLASSES:
        of_method = {name: x for name, x in of_method.items() if outputs in _make(config, arm, name, x.at(1)).compares}
    variant = f"{arm.variant}."
    for flag, value in config.search.items():
        if flag.startswith(f"{rates_key(config)}."):
            shared[flag] = parse(value, f"{SEARCH}.{flag}")
        elif flag.startswith(variant):
            of_method[flag.removeprefix(variant)] = parse(value, f"{SEARCH}.{flag}")
    return shared | of_method


def rates_key(config: Namespace) -> str:
    """Return the flag whose options set the learning rate: the optimizer's, or that of a module that makes its own."""
    return OPTIMIZER if OPTIMIZER in vars(config) else MODEL


def _optimizer_spaces(config: Namespace) -> dict[str, Space]:
    """Return learning rate and weight decay, as far as the chosen optimizer has them."""
    key = rates_key(config)
    options = {**choice_at(config, key).signature.defaults, **choice_at(config, key).init_args}
    of_optimizer: dict[str, Space] = {}
    if isinstance(rate := options.get("lr"), int | float) and rate > 0:
        of_optimizer[f"{key}.lr"] = Log(rate / AROUND, rate * AROUND)
    return of_optimizer | ({f"{key}.weight_decay": DECAY} if "weight_decay" in options else {})


def check(config: Namespace, arms: Mapping[str, Arm]) -> None:
    """Raise BadInput for a flag of `search` that names no option of a row, or a value that the option refuses.

    Also if the scheduler sets a rate that does not depend on the optimizer's, which then can't be searched.
    """
    key = rates_key(config)
    variants = {arm.variant: arm for arm in arms.values() if key == OPTIMIZER}  # else they learn by one method
    for flag, value in config.search.items():
        name, _, option = flag.partition(".")
        if name == MODEL == key and option not in OF_MODEL:
            raise BadInput(f"{SEARCH}.{flag}", value, f"{join_words(OF_MODEL, 'or')} after {SEARCH}.{MODEL}")
        if name == key and not config.tune_optimizer:
            raise BadInput(f"{SEARCH}.{flag}", value, "`tune_optimizer true` beside it")
        if name != key and name not in variants:
            names = [*variants, key]
            raise BadInput(f"{SEARCH}.{flag}", value, f"one of {', '.join(names)} after {SEARCH}{near(name, names)}")
        space = parse(value, f"{SEARCH}.{flag}")
        for tried in space.values if isinstance(space, Choice) else (space.at(0), space.at(1)):
            try:
                _check_value(config, variants.get(name), option, tried)
            except BadInput as fault:
                of_option = fault.argument.rpartition(".")[2] == option
                expected = fault.expected if of_option else f"values that fit: of {tried}, expected {fault.expected}"
                if of_option and value == tried:  # it may be meant as a form
                    expected = f"{expected}, or {EXPECTED}"
                raise BadInput(f"{SEARCH}.{flag}", value, expected) from None
    if config.tune_optimizer and vars(config).get("scheduler") is not None and not _keeps_rates(config):
        expected = f"false: {config.scheduler.name} sets every rate itself, so that none can be searched"
        raise BadInput("tune_optimizer", "true", expected)


def _check_value(config: Namespace, arm: Arm | None, option: str, value: Any) -> None:
    """Make the method, or without one the optimizer, with a value of an option; BadInput if it is refused."""
    key = rates_key(config)
    if arm is None:
        choice = choice_at(config, key)
        candidate = cli.Choice(choice.class_path, {**choice.init_args, option: convert(choice, option, value)})
        layer = nn.Linear(2, 2)
        with cli.refusals(candidate, key):
            cli.factory(candidate, key)(layer.parameters() if key == OPTIMIZER else layer)
    else:
        _make(config, arm, option, value)


def _make(config: Namespace, arm: Arm, option: str, value: Any) -> Objective:
    """Make a row's method with a value of an option."""
    choice = cli.Choice(arm.method.class_path, {**arm.method.init_args, option: convert(arm.method, option, value)})
    return replace(arm, method=choice).objective(config)


def convert(choice: cli.Choice, option: str, value: Any) -> Any:
    """Convert a value to the type of a class's option; BadInput if it does not fit."""
    return choice.signature.check(option, value)


def _keeps_rates(config: Namespace) -> bool:
    """Return whether two groups of different rates still have different ones under the scheduler."""
    layers = nn.Linear(1, 1), nn.Linear(1, 1)
    groups = [{"params": list(layer.parameters()), "lr": rate} for layer, rate in zip(layers, (0.1, 0.2), strict=True)]
    optimizer = cli.factory(config.optimizer, OPTIMIZER)(groups)
    scheduler, _ = build_scheduler(scheduler_factory(config.scheduler, "scheduler"), optimizer, nominal())
    first, second = scheduler.get_last_lr()
    return bool(first != second)


@functools.lru_cache
def _points(count: int, seed: int) -> Any:
    from scipy.stats import qmc

    engine = qmc.Sobol(DIMENSIONS, scramble=True, rng=seed)
    return engine.random_base2(math.ceil(math.log2(max(count, 2))))


def draw(config: Namespace, arm: Arm, count: int, seed: int) -> list[Arm]:
    """Draw at most `count` different settings of a row: the given one, then points of the sequence keyed by `seed`.

    Of the optimizer's options all rows try the same values, setting by setting. A point that gives a setting again is
    passed over; there are fewer settings where the spaces have no more.
    """
    key = rates_key(config)
    searched, trials = spaces(config, arm), [replace(arm, trial=0)]
    seen = [options(config, trials[0], searched)]
    if not searched:
        return trials
    for point in _points(POINTS_FOR_ONE * count, seed):
        if len(trials) == count:
            break
        values = {name: space.at(float(u)) for (name, space), u in zip(searched.items(), point, strict=False)}
        chosen, optimizer = dict(arm.method.init_args), dict[str, Any]()
        for name, value in values.items():
            if name.startswith(f"{key}."):
                short = name.removeprefix(f"{key}.")
                optimizer[short] = convert(choice_at(config, key), short, value)
            else:
                chosen[name] = convert(arm.method, name, value)
        method = cli.Choice(arm.method.class_path, chosen)
        trial = replace(arm, method=method, optimizer=optimizer, trial=len(trials))
        if options(config, trial, searched) not in seen:
            seen.append(options(config, trial, searched))
            trials.append(trial)
    return trials


def options(config: Namespace, arm: Arm, names: Mapping[str, Space]) -> dict[str, Any]:
    """Return the values of the options that are searched, as they are written down."""
    key = rates_key(config)
    everything = choice_at(arm.settings(config), key)
    usual = {**everything.signature.defaults, **everything.init_args}
    of_optimizer = {f"{key}.{name}": value for name, value in usual.items()}
    values = {name: {**arm.method.init_args, **of_optimizer}[name] for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
