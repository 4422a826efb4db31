"""Trainers as the command line describes them: every call makes a new one, with parts of its own."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from apprentice.errors import BadInput
from harness import config
from harness.runs import launch
from harness.runs.fit import MakeTrainer


def trainers(chosen: config.Choice, exact: int | None, strategies: config.Names) -> MakeTrainer:
    """What makes Trainers; it takes their arguments by keyword, `callbacks` and `plugins` on top of the user's.

    Args:
        chosen: the Trainer's settings, as `config.Parser.parse` gives them.
        exact: N of `--exact N`, for the strategy.
        strategies: the project's own, as `config.Parser.add_trainer` takes them; the one named ddp serves `--exact`
            where none is chosen.

    Raises:
        BadInput: `--exact` beside a strategy or precision that does not support it; when called, what Lightning
            refuses.
    """
    if exact is not None:
        chosen = _with_exact(chosen, exact, config.Strategies(names=strategies))
    return partial(_trainer, chosen)


def _trainer(
    chosen: config.Choice, callbacks: Sequence[Any] = (), plugins: Sequence[Any] = (), **kwargs: Any
) -> Trainer:
    settings = config.arguments(chosen, "trainer") | {"enable_model_summary": False, "num_sanity_val_steps": 0} | kwargs
    if settings["accelerator"] == "auto" and torch.backends.mps.is_available():
        settings["accelerator"] = "cpu"  # evaluation adds in float64, which Apple's GPUs don't have
    settings["callbacks"] = [*_listed(settings["callbacks"]), *callbacks]
    settings["plugins"] = [*_listed(settings["plugins"]), *plugins]
    settings = launch.with_launcher(settings)
    try:
        with config.refusals(chosen, "trainer"):
            return Trainer(**settings)
    except (MisconfigurationException, ImportError, BadInput) as error:
        if isinstance(error, BadInput) and error.flag != "trainer":
            flag = error.flag.replace("trainer.strategy.exact", "exact")
            raise BadInput(flag, error.value, error.expected) from error
        wanted = f"{settings['accelerator']} --trainer.devices {settings['devices']}"
        said = error.__cause__ if isinstance(error, BadInput) else error
        raise BadInput("trainer.accelerator", wanted, f"what this machine and Lightning have: {said}") from None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _with_exact(chosen: config.Choice, exact: int, family: config.Strategies) -> config.Choice:
    strategy = chosen.init_args["strategy"]
    if strategy == "auto":
        strategy = family.choose("ddp")
    if not family.exact(strategy):
        holding = ", ".join(name for name in family.names if family.exact(family.choose(name)))
        raise BadInput("exact", exact, f"a strategy that can hold it: {holding}; {family.label(strategy)} can't")
    if str(chosen.init_args.get("precision")) in {"16", "16-mixed"}:
        raise BadInput("exact", exact, "--trainer.precision other than 16-mixed, whose loss scale it can't hold")
    strategy = config.Choice(strategy.class_path, {**strategy.init_args, "exact": exact})
    return config.Choice(chosen.class_path, {**chosen.init_args, "strategy": strategy})
