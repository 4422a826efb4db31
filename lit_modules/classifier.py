"""A classifier of samples or of tokens, trained with cross-entropy, such as a teacher."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from apprentice.batch import Batch, Mixed
from lit_modules.learner import Learner, MakeOptimizer, MakeScheduler, adam
from lit_modules.nets import heads, pipeline_stages, run
from lit_modules.nets.recorded import Spec, rebuild
from lit_modules.nets.token_head import HIDDEN, TokenHead, find_token_head, run_before_head
from lit_modules.objectives.base import average_labelled, fill_uncounted, weigh_classes
from lit_modules.prepared import prepare_net
from lit_modules.tasks import Classification, Task, Tokens
from lit_modules.token_losses import CHUNK, LARGE
from lit_modules.token_scores import HeadInputs, Logits, Predictions, has_chunks


class LitClassifier(Learner):
    """Trains a net, inputs (B, ...) -> logits (B, classes), by its task's loss; same results on any number of devices.

    Batches are `apprentice.batch.Batch` from our data modules, or plain (inputs, labels) pairs. Samples with hidden
    labels do not count.

    Args:
        net: the net, or its class and arguments, as `load_from_checkpoint` has them.
        num_classes: number of logits.
        optimizer: makes the optimizer from parameter groups.
        scheduler: makes a learning-rate scheduler, as Learner steps it.
        seed: key of the dropout's noise.
        task: what a label is; `Tokens()` if the net gives logits (B, T, classes); default: `Classification`.
        head_only: linear probing: only the net's last linear layer, if it ends in one (`lit_modules.nets.heads`), is
            trained. All else is frozen and stays in eval mode: no dropout, and BatchNorm keeps its statistics.
    """

    compiled = False
    _head: TokenHead | None = None  # that scores leave out
    _is_searched = False
    _hidden: Tensor | None = None  # its inputs (B, T, H)
    _scoring = False

    def __init__(
        self,
        net: nn.Module | Spec,
        num_classes: int = 10,
        optimizer: MakeOptimizer = adam,
        scheduler: MakeScheduler | None = None,
        seed: int = 0,
        task: Task | None = None,
        head_only: bool = False,
    ) -> None:
        super().__init__([""], task or Classification(num_classes), optimizer, scheduler, seed)
        self.of_labels = {"loss", *self.scores_of("").trained}
        self.net = prepare_net(rebuild(net)).to(memory_format=torch.channels_last)
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

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (B, ..., classes) of inputs (B, ...), floats in the net's type."""
        if self._scoring and not self._is_searched:
            self._find_head(inputs)
        if self._scoring and self._head is not None and has_chunks(self.net, self._head, CHUNK):
            outputs = run_before_head(self.net, self._head, inputs)
            self._hidden = outputs.features[HIDDEN]
            return outputs.logits
        return run(self.net, inputs).logits

    def losses(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        self.check_labels(outputs, batch)
        labels = fill_uncounted(batch.labels, batch.label_weight)
        losses = weigh_classes(self.task.loss(outputs, labels), labels, batch.class_weights)
        if isinstance(batch.mixed, Mixed):
            second = self.task.loss(outputs, batch.mixed.labels)
            losses = batch.mixed.mean(losses, weigh_classes(second, batch.mixed.labels, batch.class_weights))
        parts = {"loss": losses, **self.scores_of("").per_label(outputs, batch.labels, losses)}
        parts = {name: average_labelled(x, batch.labels, batch.label_weight) for name, x in parts.items()}
        return self.loss_scales.scaled("", batch.mean(parts["loss"])), parts | self.task.counts(batch)

    def pipeline_stages(self) -> list[nn.Module]:
        return pipeline_stages(self.net)

    def predict(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"": self(inputs)}

    def _find_head(self, tokens: Tensor) -> None:
        """Find the head that scores leave out: of a language model with a large vocabulary that is all on this rank."""
        is_here = all(type(p) is nn.Parameter and not p.is_meta for p in self.net.parameters())
        has_chunks = isinstance(self.task, Tokens) and self.task.has_chunks
        if self.compiled or not is_here or not has_chunks or tokens.is_floating_point():
            return
        head, self._is_searched = find_token_head(self.net, tokens.new_zeros(1, 2)), True
        self._head = head if head is not None and head.size >= LARGE else None

    def evaluate(self, inputs: Tensor, beside: bool) -> Predictions:
        self.score_chunk, self._scoring, self._hidden = CHUNK, True, None
        try:
            logits: Logits = self(inputs)
        finally:
            self._scoring = False
        if self._hidden is not None and self._head is not None:
            logits, self._hidden = HeadInputs(self._hidden, *self._head.weights(self.net)), None
        return Predictions(None, {"": logits}, {})

    def step_alone(self, run: str, batch: Batch) -> Callable[[], Tensor]:
        net = copy.deepcopy(self.net).train(not self.head_only)
        if self.compiled:
            net.compile(dynamic=False)

        def step() -> Tensor:
            net.zero_grad()
            losses = self.task.loss(net(batch.inputs), fill_uncounted(batch.labels, batch.label_weight))
            return batch.mean(average_labelled(losses, batch.labels, batch.label_weight))

        return step
