"""All methods of `lit_modules.objectives` side by side: which there are, and which of them fit the chosen nets."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence

from apprentice.errors import BadInput, reason
from harness import cli
from harness.cli.classes import Classes, imported
from harness.cli.messages import one_line
from harness.cli.signatures import Missing, options_of
from harness.reports.tables import listed
from harness.runs.quiet import notice
from harness.studies.setups import Setup
from lit_modules import objectives
from lit_modules.distillation import Distillation


def methods(named: Mapping[str, str]) -> dict[str, str]:
    """Classes whose options all have defaults: by the names that `named` gives some, others by theirs in lower case."""
    names = {found: name for name, found in named.items()}
    return {names.get(found, found.lower()): found for found, missing in needs().items() if not missing}


def needs() -> dict[str, list[str]]:
    """For each method, by its class's name, the options that have no default; a Sum is none by itself."""
    return {
        name: [option for option, value in options_of(found).defaults.items() if value is Missing]
        for name, found in Classes((objectives.Objective,), objectives).known.items()
        if found is not objectives.Sum
    }


def _is_default(choice: cli.Choice) -> bool:
    """Whether a method has its default options."""
    return choice.init_args == options_of(imported(choice.class_path, "variants")).defaults


def fitting(
    config: Namespace, parser: cli.Parser, setups: Mapping[str, Setup], make: Callable[[Sequence[str]], Distillation]
) -> list[str]:
    """The rows that can be trained; a line names each of the others, with the reason.

    A method whose options are not its defaults was asked for by the user, and stays. So does one that is named alone.

    Args:
        config: the run's.
        parser: of its command line.
        setups: of the rows that are wanted.
        make: builds the module of some rows, by name, or raises.

    Raises:
        BadInput: none of them fits.
    """
    found, chosen = [], {choice.name for choice in config.variants.values()}
    for method, missing in needs().items():
        if missing and method not in chosen and config.only is None:
            notice(f"without {method.lower()}: expected --variants.NAME {method} with its {listed(missing)}")
    for name, setup in setups.items():
        if not _is_default(setup.choice) or {name, setup.row.variant} & {*(config.only or ())}:
            found.append(name)
            continue
        try:
            make([name])
        except Exception as error:  # noqa: BLE001 - whatever it is: the other methods don't depend on it
            notice(f"without {name}: {one_line(error, parser) or reason(error)}")
        else:
            found.append(name)
    if not found:
        raise BadInput("zoo", "true", "nets that at least one method fits")
    return found
