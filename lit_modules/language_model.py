"""Training of a language model on next-token prediction."""

import math
from functools import partial
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from apprentice.errors import BadInput
from lit_modules.classifier import LitClassifier
from lit_modules.learner import Learner
from lit_modules.objectives.base import positive, weight
from lit_modules.tasks import Tokens


class TrainsAsGPT2(Learner):
    """How GPT-2 was trained, for each run of a module by itself.

    AdamW with weight decay for matrices only; linear warm-up, then cosine decay to a tenth at the Trainer's last step;
    gradients clipped by norm. A run's `optimizer_options` may have an `lr` and a `weight_decay` of its own.
    """

    compiled = False

    def set_training(
        self,
        lr: float,
        warmup_steps: int,
        weight_decay: float,
        betas: tuple[float, float],
        clip_norm: float,
        compiled: bool,
    ) -> None:
        """Check and keep the options, as `LitLanguageModel` describes them."""
        if compiled and self.relates_rows:
            raise BadInput("compiled", True, "false, or balance=0: routers' outputs of a compiled net can't be read")
        for name, value in {"warmup_steps": warmup_steps, "weight_decay": weight_decay, "clip_norm": clip_norm}.items():
            weight(name, value)
        if not all(0 <= beta < 1 for beta in betas):
            raise BadInput("betas", list(betas), "two numbers of at least 0 and below 1")
        self.lr, self.betas, self.compiled = positive("lr", lr), betas, compiled
        self.warmup_steps, self.weight_decay, self.clip_norm = warmup_steps, weight_decay, clip_norm

    def on_fit_start(self) -> None:
        """Compile the nets; not earlier, as a compiled net can't be pickled or used in a fork."""
        super().on_fit_start()
        if self.compiled:
            nets = "the net" if len(self.runs) == 1 else "the nets"
            rank_zero_only(print)(
                f"compiling {nets}: the first steps of training and validation take longer", flush=True
            )
            for run in self.runs:
                self.net_of(run).compile(dynamic=False)

    def configure_optimizers(self) -> Any:
        self.check_trainable()
        self.loss_scales.take_over(self.trainer.precision_plugin, self.runs)
        groups = []
        for run, parameters in self.parameter_groups().items():
            options = {"lr": self.lr, "weight_decay": self.weight_decay, **self.optimizer_options.get(run, {})}
            matrices, others = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
            groups += [{**options, "params": matrices}, {**options, "params": others, "weight_decay": 0.0}]
        optimizer = AdamW(groups, self.lr, self.betas, fused=True)
        steps = self.trainer.estimated_stepping_batches
        schedule = LambdaLR(optimizer, partial(rate_factor, self.warmup_steps, steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        clip = self.clip_norm if gradient_clip_val is None else gradient_clip_val
        super().configure_gradient_clipping(optimizer, clip, gradient_clip_algorithm)


class LitLanguageModel(TrainsAsGPT2, LitClassifier):
    """Trains a net, tokens (B, T) -> logits (B, T, V), as GPT-2 was; same results on any number of devices.

    AdamW with weight decay for matrices only; linear warm-up for `warmup_steps`, then cosine decay to a tenth at the
    Trainer's last step; gradients clipped by norm. Batches are `apprentice.batch.Batch` with labels (b, T), or plain
    (tokens, labels) pairs.

    Args:
        net: the net.
        lr: the highest learning rate.
        warmup_steps: steps in which it rises.
        weight_decay: of parameters with two dimensions or more.
        betas: AdamW's.
        clip_norm: maximum norm of gradients, unless the Trainer has a `gradient_clip_val`; 0 for no clipping.
        tokens_per_character: 1 if tokens are characters; for bits per character.
        compiled: compile the net with torch.compile, in each rank at the start of a fit.
        seed: key of the dropout's noise.
    """

    def __init__(
        self,
        net: nn.Module,
        lr: float = 3e-3,
        warmup_steps: int = 100,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.99),
        clip_norm: float = 1.0,
        tokens_per_character: float = 1.0,
        compiled: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(net, seed=seed, task=Tokens(tokens_per_character))
        self.set_training(lr, warmup_steps, weight_decay, betas, clip_norm, compiled)


def rate_factor(warmup_steps: int, steps: float, step: int) -> float:
    """The learning rate of a step divided by the highest one: linear warm-up, then a half cosine from 1 to a tenth."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    done = min((step - warmup_steps) / max(steps - warmup_steps, 1), 1.0)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
