"""The arms of a comparison: each method of `--variants` for each net of `--students`, as `--only` picks them."""

from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from apprentice.errors import BadInput
from harness import cli
from harness.cli.rows import VARIANTS
from harness.runs.plans import Arm


def arms(config: Namespace) -> dict[str, Arm]:
    """Return the arms of `--only`, and those that they learn from, by name, with the user's settings."""
    rows = cli.rows(Namespace(**{**vars(config), "only": None}))
    all_arms = {name: Arm(name, row.net, config.variants[row.variant], row.variant) for name, row in rows.items()}
    names, queue = set[str](), deque(cli.rows(config))
    while queue:
        name = queue.popleft()
        if name in all_arms and name not in names:
            names.add(name)
            queue.extend(all_arms[name].objective(config).peers)
    return {name: arm for name, arm in all_arms.items() if name in names}


@contextmanager
def flags_of(arms: Iterable[Arm]) -> Iterator[None]:
    """Turn the flag of an arm's error, its name below `--variants`, into its method's, and add its net's."""
    try:
        yield
    except BadInput as fault:
        for arm in arms:
            flag = f"{VARIANTS}.{arm.name}"
            if arm.student and (fault.argument == flag or fault.argument.startswith(f"{flag}.")):
                whole = f"{VARIANTS}.{arm.variant}{fault.argument.removeprefix(flag)}"
                raise BadInput(whole, fault.value, f"{fault.expected} (for --{arm.net})") from None
        raise
