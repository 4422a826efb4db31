"""How each student of a study is trained: its net, its method with the options, and what it has of its own."""

from argparse import Namespace
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from harness import cli
from harness.cli.rows import VARIANTS
from lit_modules.objectives import Objective


class Setup(NamedTuple):
    """A row of the comparison with the settings that it is trained with."""

    row: cli.Row
    choice: cli.Choice  # the objective's class and options
    optimizer: Mapping[str, Any] = MappingProxyType({})  # options of the optimizer that are not the run's
    trial: int | None = None  # its number, where several settings of the row are tried

    @property
    def name(self) -> str:
        """That of the student in its fit."""
        return self.row.name if self.trial is None else trial_name(self.row.name, self.trial)

    def objective(self, config: Namespace) -> Objective:
        """A new one; peers that are named by their variants are those of its net, others are named as rows."""
        made: Objective = cli.build(self.choice, f"{VARIANTS}.{self.row.variant}")
        for part in (part for part in made.modules() if isinstance(part, Objective)):
            part.peers = [self._peer(peer, config) for peer in part.peers]
        return made

    def _peer(self, peer: str, config: Namespace) -> str:
        name = self.row._replace(variant=peer).name if peer in config.variants else peer
        return name if self.trial is None else trial_name(name, self.trial)

    def settings(self, config: Namespace) -> Namespace:
        """The configuration with the options that are its own."""
        chosen = config.optimizer
        own = cli.Choice(chosen.class_path, {**chosen.init_args, **self.optimizer})
        return Namespace(**{**vars(config), "optimizer": own})


def trial_name(row: str, trial: int) -> str:
    """The name of one of several settings of a row; no row has such a name."""
    return f"{row}@{trial}"


def wanted(config: Namespace) -> dict[str, Setup]:
    """The rows to train, with the settings that were given: those of `--only`, and the peers that they learn from."""
    rows = cli.rows(Namespace(**{**vars(config), "only": None}))
    known = {name: Setup(row, config.variants[row.variant]) for name, row in rows.items()}
    found = list(cli.rows(config))
    for name in found:  # it grows
        found += [peer for peer in known[name].objective(config).peers if peer in known and peer not in found]
    return {name: setup for name, setup in known.items() if name in found}


def rows(setups: Iterable[Setup]) -> list[cli.Row]:
    """Their rows."""
    return [setup.row for setup in setups]
