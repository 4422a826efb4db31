"""Training of several language models side by side."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lit_modules.distillation import Distillation
from lit_modules.nets.specs import Spec
from lit_modules.objectives.cross_entropy import CrossEntropy
from lit_modules.tasks import Task, Tokens
from lit_modules.text.gpt2_optimization import GPT2Optimization, learning_rate


class LanguageModels(Distillation):
    """Trains nets, tokens (B, T) -> logits (B, T, V), on the same batches, each as `LitLanguageModel` trains one.

    They share batches and the noise's key, and nothing else: a net has the numbers that it would have alone. It is a
    `Distillation` whose students learn from labels, without a teacher.

    Args:
        nets: by name, or their classes and arguments.
        input_shape: (T,), of one input.
        num_classes: V, number of tokens.
        lr: the highest learning rate.
        warmup_steps: steps in which it rises.
        weight_decay: of parameters with two dimensions or more.
        betas: AdamW's.
        clip_norm: maximum norm of each net's gradients, unless the Trainer has a `gradient_clip_val`; 0 for none.
        compiled: compile the nets with torch.compile, in each rank at the start of a fit.
        seed: key of the dropout's noise.
        task: how texts are scored; default: `Tokens()`.
        optimizer_options: of nets with an `lr` or `weight_decay` of their own, as {"wide": {"lr": 0.001}}.
        end_tokens: tokens that end a response.
    """

    optimization: GPT2Optimization
    lr = learning_rate

    def __init__(
        self,
        nets: Mapping[str, nn.Module | Spec],
        input_shape: tuple[int, ...],
        num_classes: int,
        lr: float = 3e-3,
        warmup_steps: int = 100,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.99),
        clip_norm: float = 1.0,
        compiled: bool = False,
        seed: int = 0,
        task: Task | None = None,
        optimizer_options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        end_tokens: tuple[int, ...] = (),
    ) -> None:
        students: dict[str, Any] = {name: (net, CrossEntropy()) for name, net in nets.items()}
        optimization = GPT2Optimization(lr, warmup_steps, weight_decay, betas, clip_norm, compiled, optimizer_options)
        super().__init__(
            None, students, input_shape, num_classes, seed=seed, task=task or Tokens(), input_dtype=torch.int64,
            optimization=optimization, end_tokens=end_tokens,
            loss_chunk=0 if compiled else None,  # a compiled net is called as a whole
        )  # fmt: skip
        optimization.check_loop(self)
