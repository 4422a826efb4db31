"""How GPT-2 was trained."""

import math
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.utilities import rank_zero_only
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from apprentice.errors import BadInput
from lit_modules.objectives.base import positive, weight
from lit_modules.training.optimization import Optimization, check_trainable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lit_modules.training.loop import Loop


class GPT2Optimization(Optimization):
    """AdamW with weight decay for matrices only, and a schedule of its own.

    The rate rises linearly, then falls along a cosine to a tenth at the Trainer's last step. Gradients are clipped by
    norm, for each run by itself. A run's options may be an `lr` and a `weight_decay` of its own. Arguments are those of
    `LitLanguageModel`.

    Raises:
        BadInput: a number is out of range.
    """

    def __init__(
        self,
        lr: float,
        warmup_steps: int,
        weight_decay: float,
        betas: tuple[float, float],
        clip_norm: float,
        compiled: bool,
        options: "Mapping[str, Mapping[str, Any]] | None" = None,
    ) -> None:
        super().__init__(options=options or {})
        for name, value in {"warmup_steps": warmup_steps, "weight_decay": weight_decay, "clip_norm": clip_norm}.items():
            weight(name, value)
        if not all(0 <= beta < 1 for beta in betas):
            raise BadInput("betas", list(betas), "two numbers of at least 0 and below 1")
        self.lr, self.betas, self.compiled = positive("lr", lr), betas, compiled
        self.warmup_steps, self.weight_decay, self.clip_norm = warmup_steps, weight_decay, clip_norm

    def check_loop(self, loop: "Loop") -> None:
        if self.compiled and loop.layout().relates_rows:
            raise BadInput("compiled", True, "false, or balance=0: routers' outputs of a compiled net can't be read")

    def on_fit_start(self, loop: "Loop") -> None:
        """Compile the nets; not earlier, as a compiled net can't be pickled or used in a fork."""
        if self.compiled:
            nets = "the net" if len(loop.runs) == 1 else "the nets"
            rank_zero_only(print)(
                f"compiling {nets}: the first steps of training and validation take longer", flush=True
            )
            for run in loop.runs:
                loop.net_of(run).compile(dynamic=False)

    def configure(self, loop: "Loop") -> Any:
        check_trainable(loop)
        groups = []
        for run, parameters in loop.parameter_groups().items():
            options = {"lr": self.lr, "weight_decay": self.weight_decay, **self.options.get(run, {})}
            matrices, others = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
            groups += [{**options, "params": matrices}, {**options, "params": others, "weight_decay": 0.0}]
        optimizer = AdamW(groups, self.lr, self.betas, fused=True)
        steps = loop.trainer.estimated_stepping_batches
        schedule = LambdaLR(optimizer, partial(rate_factor, self.warmup_steps, steps))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def clip(self, loop: "Loop", norm: float | None, algorithm: str | None) -> None:
        super().clip(loop, self.clip_norm if norm is None else norm, algorithm)


def _get_rate(loop: "Loop") -> float:
    return cast("GPT2Optimization", loop.optimization).lr


def _set_rate(loop: "Loop", value: float) -> None:
    cast("GPT2Optimization", loop.optimization).lr = value


# Of a loop that has this optimization.
learning_rate = property(_get_rate, _set_rate, doc="The highest rate, which Lightning's `LearningRateFinder` sets.")


def rate_factor(warmup_steps: int, steps: float, step: int) -> float:
    """The learning rate of a step divided by the highest one: linear warm-up, then a half cosine from 1 to a tenth."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    done = min((step - warmup_steps) / max(steps - warmup_steps, 1), 1.0)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
