"""A classifier of samples or of tokens, trained with cross-entropy, such as a teacher."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from apprentice.batch import Batch, Mixed
from apprentice.contract import ModuleLayout
from apprentice.relations import relate
from lit_modules.nets.base import pipeline_stages
from lit_modules.nets.layers import heads, run
from lit_modules.nets.outputs import Outputs
from lit_modules.nets.specs import Spec, rebuild
from lit_modules.nets.stored import TeacherInFile
from lit_modules.objectives.base import average_labelled, replace_ignored_labels, weigh_classes
from lit_modules.tasks import Classification, Task
from lit_modules.training.extras import extras_of_nets
from lit_modules.training.loop import Loop
from lit_modules.training.optimization import MakeOptimizer, MakeScheduler, Optimization, adam
from lit_modules.training.preparation import prepare_net
from lit_modules.training.run_scores import evaluated_part
from lit_modules.training.whole_outputs import Predictions


class LitClassifier(Loop):
    """Trains a net, inputs (B, ...) -> logits (B, classes), by its task's loss; same results on any number of devices.

    Batches are `apprentice.batch.Batch` from our data modules, or plain (inputs, labels) pairs. Samples with hidden
    labels do not count.

    Args:
        net: the net, or its class and arguments, as `load_from_checkpoint` has them.
        num_classes: number of logits.
        optimizer: makes the optimizer from parameter groups.
        scheduler: makes a learning-rate scheduler, as `Optimization` steps it.
        seed: key of the dropout's noise.
        task: what a label is; default: `Classification`.
        head_only: linear probing: only the net's last linear layer, if it ends in one (`lit_modules.nets.heads`), is
            trained. All else is frozen and stays in eval mode: no dropout, and BatchNorm keeps its statistics.
        optimization: in place of optimizer and scheduler.
        options: of the task's parts.
    """

    def __init__(
        self,
        net: nn.Module | Spec,
        num_classes: int = 10,
        optimizer: MakeOptimizer = adam,
        scheduler: MakeScheduler | None = None,
        seed: int = 0,
        task: Task | None = None,
        head_only: bool = False,
        optimization: Optimization | None = None,
        **options: Any,
    ) -> None:
        optimization = optimization or Optimization(optimizer, scheduler)
        super().__init__([""], task or Classification(num_classes), optimization, seed, **options)
        self.training_log.labelled_only = {"loss", *self.scores_of("").trained}
        self.net = prepare_net(rebuild(net)).to(memory_format=torch.channels_last)
        self.extras = [*extras_of_nets(self), *self.parts.extras()]
        self.head_only = head_only
        if head_only:
            trained = heads(self.net)
            self.net.requires_grad_(False)
            for head in trained:
                head.requires_grad_(True)
            self.train()

    def train(self, mode: bool = True) -> "LitClassifier":
        super().train(mode)
        if self.head_only:
            self.net.eval()
        return self

    def net_of(self, run: str) -> nn.Module:
        return self.net

    def forward(self, inputs: Tensor, *beside: Tensor) -> Tensor:
        """Logits (B, ..., classes) of inputs (B, ...), floats in the net's type, and of what it reads beside them."""
        return run(self.net, inputs, (), beside).logits

    def losses(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        self.reader.check_labels(outputs, batch, self.training)
        labels = replace_ignored_labels(batch.labels, batch.label_weight)
        if self.task.relates_rows:
            losses, _ = relate(lambda rows: (self.task.loss(*rows), {}), (outputs, labels), batch.rows, batch.count)
        else:
            losses = weigh_classes(self.task.loss(outputs, labels), labels, batch.class_weights)
        if isinstance(batch.mixed, Mixed):
            second = self.task.loss(outputs, batch.mixed.labels)
            losses = batch.mixed.mean(losses, weigh_classes(second, batch.mixed.labels, batch.class_weights))
        parts = {"loss": losses, **self.scores_of("").per_label(outputs, batch.labels, losses)}
        parts = {name: average_labelled(x, batch.labels, batch.label_weight) for name, x in parts.items()}
        return self.loss_scales.scaled("", batch.mean(parts["loss"])), parts | self.task.counts(batch)

    def find_layout(self) -> ModuleLayout:
        layout = super().find_layout()
        return replace(layout, relates_rows=layout.relates_rows or self.task.relates_rows)

    def pipeline_stages(self) -> list[nn.Module]:
        return pipeline_stages(self.net)

    def predict(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"": self(inputs)}

    def evaluate(self, batch: Batch, beside: bool) -> Predictions[Outputs]:
        if isinstance(self.net, TeacherInFile):
            return Predictions(None, {"": self.net.rows(evaluated_part(self.attached_trainer), batch.index)}, {})
        if self.optimization.compiled:
            return super().evaluate(batch, beside)
        return Predictions(None, {"": self.outputs.run_alone(self.net, batch.inputs, self)}, {})

    def timed_steps(self, run: str, batch: Batch) -> dict[float, Callable[[], Tensor]]:
        net = copy.deepcopy(self.net).train(not self.head_only)
        if self.optimization.compiled:
            net.compile(dynamic=False)

        def step() -> Tensor:
            net.zero_grad()
            losses = self.task.loss(net(batch.inputs), replace_ignored_labels(batch.labels, batch.label_weight))
            return batch.mean(average_labelled(losses, batch.labels, batch.label_weight))

        return {0.0: step}
