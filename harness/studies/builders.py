"""What experiments build alike from the configuration: nets, optimizers, and checks of a net before any training."""

from argparse import Namespace
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import Trainer
from torch import nn

import strategies
from apprentice.keyed import with_seed
from harness import config as cli
from harness.runs.nets import spec
from harness.runs.session import Session
from harness.studies.fits import Candidate
from lit_modules import nets
from lit_modules.learner import Learner


def make_net(config: Namespace, key: str, seed: int, given: Mapping[str, Any], double: bool = False) -> nn.Module:
    """The net chosen under a key, its first weights from the seed alone; `given` are arguments that the data fixes."""
    net: nn.Module = with_seed(seed, lambda: cli.build(getattr(config, key), key, **given))
    return net.double() if double else net


def make_candidate(
    run: Session, key: str, seed: int, objective: str, options: Mapping[str, Any], double: bool = False
) -> Candidate:
    """The net chosen under a key as a candidate of a fit; TensorBoard shows `options` beside its results."""
    choice, given = getattr(run.config, key), run.data.net_arguments
    net = make_net(run.config, key, seed, given, double)
    return Candidate(net, spec(choice.class_path, cli.arguments(choice, key, **given)), objective, options)


def learning(config: Namespace) -> dict[str, Any]:
    """What makes the chosen optimizer and scheduler, as arguments of a Learner."""
    scheduler = None if config.scheduler is None else cli.factory(config.scheduler, "scheduler")
    return {"optimizer": cli.factory(config.optimizer, "optimizer"), "scheduler": scheduler}


def check_net(run: Session, key: str, trainer: Trainer, trained: bool = True) -> None:
    """Try the net chosen under a key on the data, and cut it if the strategy will; `trained` unless only evaluated.

    Raises:
        BadInput: its first weights do not follow from the seed, it does not fit the data, or it can't be cut.
    """
    config, data, strategy = run.config, run.data, trainer.strategy
    net, again = (make_net(config, key, config.seeds[0], data.net_arguments, run.is_double) for _ in range(2))
    if trained:
        nets.check_same_start(net, again, key)
    logits = (data.num_classes,) if data.tokens_per_character is None else (*data.input_shape, data.num_classes)
    # A GPU's kernels are not tried: after that, forked ranks could not use the GPU.
    with nullcontext() if strategy.root_device.type == "cpu" else nets.any_kernel(net):
        nets.check_fits(net, data.example, logits, key, trained)
    if isinstance(strategy, strategies.PipelineStrategy) or getattr(strategy, "devices_per_worker", 1) > 1:
        with cli.refusals(getattr(config, key), key):
            nets.pipeline_stages(net, key)


def check_modules(trainer: Trainer, *modules: Learner) -> None:
    """Raise BadInput if the strategy can't train one of the modules."""
    if isinstance(trainer.strategy, strategies.DataParallel):
        for module in modules:
            trainer.strategy.check_module(module)
