"""All methods of `lit_modules.objectives` side by side: which there are, and which of them fit the chosen nets."""

from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from apprentice.errors import BadInput, reason
from harness import cli
from harness.cli.classes import Classes, import_class
from harness.cli.messages import one_line
from harness.cli.signatures import Missing, options_of
from harness.cli.sources import below
from harness.reports.tables import join_words
from harness.runs.plans import Arm
from harness.runs.quiet import notice
from harness.studies.kinds import settings_by_task, task_of_choice
from harness.studies.recipes import RECIPES
from lit_modules import objectives
from lit_modules.nets.outputs import CLASSES, KINDS, LABELS, UNLABELLED, VALUES
from lit_modules.objectives.base import Objective
from lit_modules.objectives.sum import Sum
from lit_modules.tasks import TASKS, task_class

SHORT = {"reverse": "ReverseKL", "skew": "SkewKL", "akl": "AdaptiveKL", "tv": "TotalVariation"}  # names in `only`


def task_of(flags: Mapping[str, Any]) -> str | None:
    """Return the task by which methods are listed: `data.task`, or that of a class whose labels are no classes."""
    task, data = flags.get("data.task"), str(flags.get("data", ""))
    if task is not None or "." not in data:
        return task
    own = getattr(import_class(data, "data"), "task", None)
    return own if isinstance(own, str) and own in TASKS and outputs_of(own) in {LABELS, VALUES} else None


def named(variants: Mapping[str, str], task: str | None = None) -> dict[str, str]:
    """List the methods that `only` may name beside the variants, by their names in `methods` and short ones."""
    kinds = None if task else {*KINDS} - {*UNLABELLED}  # data of the user's own may have any labels
    short = {name: method for name, method in SHORT.items() if method in needs(task)}
    known = {**variants, **variants_of(task)}
    return {name: method for name, method in {**methods(variants, task, kinds), **short}.items() if name not in known}


def recipes_of_one(variants: Mapping[str, str], flags: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return for each of these names the settings by which a run of these flags' task has its method."""
    return {name: {"variants": {name: method}} for name, method in named(variants, task_of(flags)).items()}


def recipes_of_all(variants: Mapping[str, str], flags: Mapping[str, Any]) -> dict[Any, dict[str, Any]]:
    """Return the settings by which a run of these flags' task has all methods."""
    return {True: {"variants": methods(variants, task_of(flags))}}


def methods(
    variants: Mapping[str, str], task: str | None = None, kinds: Collection[str] | None = None
) -> dict[str, str]:
    """List classes whose options all have defaults, by their names in `variants` or a task's, others in lower case."""
    names = {method: name for name, method in reversed([*(variants_of(task) or variants).items()])}
    return {names.get(method, method.lower()): method for method, missing in needs(task, kinds).items() if not missing}


def variants_of(task: str | None) -> dict[str, str]:
    """Return the methods that data of a task bring in place of the variants, by their names."""
    settings = settings_by_task().get(task or "", {})
    flags = {flag.removeprefix("variants."): value for flag, value in settings.items() if flag.startswith("variants.")}
    return {name: method for name, method in flags.items() if "." not in name and method is not None}


def needs(task: str | None = None, kinds: Collection[str] | None = None) -> dict[str, list[str]]:
    """List the options without a default of each method that compares some kinds of outputs, by its class's name.

    Default: those of the task. A Sum is none by itself.
    """
    kinds = {outputs_of(task)} if kinds is None else kinds
    return {
        name: [option for option, value in options_of(method).defaults.items() if value is Missing]
        for name, method in _classes().items()
        if not method.compares.isdisjoint(kinds)
    }


def outputs_of(task: str | None) -> str:
    """Return the kind of outputs that methods compare, of images with one class each where a task has no name."""
    return task_class(task).outputs if task else CLASSES


def _classes() -> dict[str, type[Objective]]:
    classes = Classes((Objective,), objectives).by_name
    return {name: c for name, c in classes.items() if issubclass(c, Objective) and c is not Sum}


def list_fitting(
    config: Namespace, parser: cli.Parser, arms: Mapping[str, Arm], build: Callable[[Sequence[str]], object]
) -> list[str]:
    """Name the arms that can be trained; a line names each of the others, with the reason.

    A method whose options are neither its defaults nor the recipe's was asked for by the user, and stays. So does one
    that is named alone.

    Raises:
        BadInput: none of them fits.
    """
    task = task_of_choice(config.data) or None
    chosen = {choice.name for choice in config.variants.values()}
    if (outputs := outputs_of(task)) != CLASSES and config.only is None:
        others = join_words([name for name, method in _classes().items() if outputs not in method.compares])
        notice(f"without {others}, which do not compare {outputs}")
    for method, missing in needs(task).items():
        if missing and method not in chosen and config.only is None:
            line = f"without {method.lower()}: expected `variants.NAME {method}` with its {join_words(missing)}"
            notice(cli.as_flags(line, parser))

    def is_asked_for(name: str, arm: Arm) -> bool:
        of_recipe = below(f"variants.{arm.variant}", RECIPES[config.recipe]) if config.recipe else {}
        is_default = arm.method.init_args == {**arm.method.signature.defaults, **of_recipe}
        return not is_default or bool({name, arm.variant} & {*(config.only or ())})

    asked_for = {name for name, arm in arms.items() if is_asked_for(name, arm)}
    compared = [name for name, arm in arms.items() if name in asked_for or outputs in arm.method.target.compares]
    if not (fit := keep_fitting(compared, asked_for, parser, build)):
        raise BadInput("zoo", "true", "nets that at least one method fits")
    return fit


def keep_fitting(
    names: Iterable[str], asked_for: Collection[str], parser: cli.Parser, build: Callable[[Sequence[str]], object]
) -> list[str]:
    """Name those that can be built, and those that were asked for; a line names each of the others, with the reason."""
    fit = []
    for name in names:
        try:
            if name not in asked_for:
                build([name])
        except Exception as error:  # noqa: BLE001 - whatever it is: the others don't depend on it
            notice(f"without {name}: {one_line(error, parser) or reason(error)}")
        else:
            fit.append(name)
    return fit
