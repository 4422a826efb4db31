"""Whether nets and modules can be trained: by the data, the strategy, the batch size; before anything is."""

import copy
from contextlib import nullcontext

from lightning.pytorch import Trainer

import strategies
from apprentice.errors import BadInput, reason
from harness import cli
from harness.runs.session import Session
from harness.studies.choices import make_net
from lit_modules import nets
from lit_modules.learner import Learner


def check_net(run: Session, key: str, trainer: Trainer, trained: bool = True) -> None:
    """Raise BadInput if the net chosen under a key does not fit seed, data or strategy; `trained` or only evaluated."""
    config, data, strategy = run.config, run.data, trainer.strategy
    net, again = (make_net(config, key, config.seeds[0], data.net_arguments, run.is_double) for _ in range(2))
    if trained:
        nets.check_same_start(net, again, key)
    if isinstance(net, nets.Net):
        for flag, expected in net.expects.items():
            if hasattr(data, flag) and tuple(getattr(data, flag)) != tuple(expected):
                trained_with = f"{list(expected)}, with which the weights of --{key} were trained"
                raise BadInput(f"data.{flag}", list(getattr(data, flag)), trained_with)
        if net.tokenizer is not None:
            data.check_tokenizer(net.tokenizer, f"--{key}")
    logits = *data.label_shape, data.num_classes
    # A GPU's kernels are not tried: after that, forked ranks could not use the GPU.
    with nullcontext() if strategy.root_device.type == "cpu" else nets.any_kernel(net):
        nets.check_fits(net, data.example, logits, key, trained)
    if isinstance(strategy, strategies.PipelineStrategy) or getattr(strategy, "splits", False):
        with cli.refusals(cli.choice_at(config, key), key):
            nets.pipeline_stages(net, key)


def check_modules(run: Session, trainer: Trainer, *modules: Learner) -> None:
    """Raise BadInput if the strategy can't train one of the modules."""
    if isinstance(trainer.strategy, strategies.DataParallel):
        for module in modules:
            try:
                with cli.refusals(run.config.trainer, "trainer"):
                    trainer.strategy.check_module(module)
            except BadInput as error:
                option = error.argument.removeprefix("trainer.")
                if error.__cause__ is not None and option in {"trainer", *vars(run.config)}:  # such as --exact
                    raise error.__cause__ from None
                raise


def check_batch_size(run: Session, *modules: Learner) -> None:
    """Raise BadInput if a module can't be trained as each batch has one row, which has no variance for BatchNorm."""
    if min(run.data.batch_size, run.used["train"]) > 1:
        return
    for module in modules:
        try:
            copy.deepcopy(module).train()(nets.cast_inputs(module, run.data.example[:1]))
        except ValueError as error:
            raise BadInput("data.batch_size", run.data.batch_size, f"at least 2; {reason(error)}") from None
