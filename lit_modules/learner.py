"""The base of the suite's LightningModules: optimization of one or several runs at the same time."""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from functools import cached_property, partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from apprentice import keyed, replicas
from apprentice.batch import Batch
from apprentice.errors import BadInput, naming, reason
from lit_modules.expert_balance import BALANCE, balance_loss, balanced_mixtures, observe_routers
from lit_modules.labels import is_pair, require_batch
from lit_modules.loss_scale import HOPELESS, LossScales
from lit_modules.nets.layers import keep_texts_apart
from lit_modules.nets.mlps import MixtureOfExperts
from lit_modules.nets.recorded import rebuild
from lit_modules.run_metrics import RunMetrics, global_means, tags
from lit_modules.schedules import Length, MakeScheduler, build_scheduler, check_steps, nominal
from lit_modules.tasks.base import LABELLED, TEXTS, TOKENS, Task

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]
adam = partial(Adam, lr=1e-3)  # the tutorial's optimizer


class Learner(RunMetrics):
    """Trains one or several runs, such as the students of a distillation, which do not affect each other.

    Each run has a parameter group, a gradient norm and a loss scale of its own. A run with a loss or gradient that is
    not finite has failed: its parameters no longer change, and `failed` names it. The scheduler is stepped once an
    epoch, but those of `lit_modules.schedules.BY_STEP` with each step of the optimizer. A module that is one run calls
    it "".

    Attributes:
        saved: attributes that a checkpoint holds, beside the loss scales.
        optimizer_options: by run, options of the optimizer that are not those of the others.
        start: the state of one optimizer, and of a scheduler or None, with which a fit begins unless it is resumed.
    """

    saved: tuple[str, ...] = ("train_sums", "samples", "epochs", "validated", "failed", "stopped")
    optimizer_options: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    start: tuple[dict[str, Any], dict[str, Any] | None] | None = None

    def __init__(
        self,
        runs: Iterable[str],
        task: Task,
        optimizer: MakeOptimizer = adam,
        scheduler: MakeScheduler | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(runs, rebuild(task, "task"))
        self.make_optimizer: MakeOptimizer = rebuild(optimizer, "optimizer")
        self.make_scheduler: MakeScheduler | None = rebuild(scheduler, "scheduler")
        self.seed = seed
        self.loss_scales = LossScales()
        self._accumulated: list[float] = []  # of texts, the tokens that count in each batch since the last step
        self._label_weight: float | Tensor | None = (
            None  # of the current batch, if it is a plain pair: see `apprentice.batch`
        )

    def net_of(self, run: str) -> nn.Module:
        raise NotImplementedError

    def module_of(self, run: str) -> nn.Module:
        """What of a run is trained: its net, perhaps with parts of an objective."""
        return self.net_of(run)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """The trainable parameters of each run."""
        return {run: [p for p in self.module_of(run).parameters() if p.requires_grad] for run in self.runs}

    def check_trainable(self) -> None:
        """Raise BadInput if a net is frozen."""
        for run in self.runs:
            net = self.net_of(run)
            if not any(p.requires_grad for p in net.parameters()):
                expected = "a net that can be trained; all of its parameters are frozen"
                raise BadInput(f"variants.{run}" if run else "net", type(net).__name__, expected)

    def losses(self, outputs: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The result of `shard_step`, given the output of `forward` for the batch's inputs."""
        raise NotImplementedError

    def step_alone(self, run: str, batch: Batch) -> Callable[[], Tensor]:
        """A step of a copy of one run, to measure its cost; what it needs of others is computed beforehand.

        It clears gradients, as adding to old ones takes time, and returns the loss; the caller runs backward.
        """
        raise NotImplementedError

    def steps_alone(self, run: str, batch: Batch) -> list[tuple[float, Callable[[], Tensor]]]:
        """Steps of a copy of one run, for each part of its training with a cost of its own, and the share of each."""
        return [(1.0, self.step_alone(run, batch))]

    def inspect_labels(self, batch: Any) -> None:
        """Also keep the `label_weight` of a plain pair, for a strategy that cuts it in shards."""
        super().inspect_labels(batch)
        if is_pair(batch):
            self._label_weight = Batch.of(batch, 0, shared=False).label_weight

    @property
    def batches_done(self) -> int:
        """Batches that training has completed; `global_step` counts optimizer steps, each of several batches."""
        if self.attached_trainer is None:
            return 0
        # The only one of Lightning's counts that is right after any resume.
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.completed

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """This rank's part of the loss of all runs."""
        batch = Batch.of(require_batch(batch), self.batches_done)
        self._label_weight = batch.label_weight
        loss, parts = self.shard_step(batch)
        self.on_global_batch(global_means(parts, batch), batch.count)
        return loss

    def shard_step(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The part of the loss, and (b,) values by `<run>/<what>`, of b rows of a global batch; changes no state.

        A strategy that splits a batch calls this for each part, and `on_global_batch` once.
        """
        batch = self._part(batch)
        noise = keyed.noise(self.seed, batch.step, batch.rows)
        mixtures = {run: mixtures for run, mixtures in self._mixtures.items() if run not in self.inactive}
        with noise, keep_texts_apart(batch.starts), self.naming_inputs(batch.inputs), ExitStack() as stack:
            routers = {run: stack.enter_context(observe_routers(mixtures)) for run, mixtures in mixtures.items()}
            outputs = self(batch.inputs)
        loss, parts = self.losses(outputs, batch)
        for run, logits in routers.items():
            balance = balance_loss(mixtures[run], logits, batch)
            loss = loss + self.loss_scales.scaled(run, batch.mean(balance))
            parts[f"{run}/{BALANCE}".lstrip("/")] = balance.detach()
        return loss, parts

    @cached_property
    def _mixtures(self) -> dict[str, dict[str, MixtureOfExperts]]:
        """The mixtures of experts, by path, of each run that has some whose loads a loss balances."""
        mixtures = {run: balanced_mixtures(self.net_of(run)) for run in self.runs}
        return {run: some for run, some in mixtures.items() if some}

    @property
    def relates_rows(self) -> bool:
        """Whether the loss relates rows of the global batch; strategies that can't do so refuse it."""
        return bool(self._mixtures)

    def pipeline_loss(self, output: Any, batch: Any) -> Tensor:
        """The loss of some rows, given the last stage's output for them."""
        return self.losses(output, self._part(batch))[0]

    def _part(self, batch: Any) -> Batch:
        """Return some rows of a global batch, or all; a shard of a plain pair gets the whole pair's `label_weight`."""
        if isinstance(batch, Batch):
            return batch
        rows = Batch.of(require_batch(batch), self.batches_done)
        return rows._replace(label_weight=self._label_weight) if replicas.is_shard() else rows

    def on_global_batch(self, means: Mapping[str, float], count: int) -> list[nn.Parameter]:
        """Log a global batch of `count` rows by its means, `<run>/<what>` to value.

        A run with a value that is not finite has failed, on all ranks alike. Returns those of `idle_parameters`.
        """
        counts = {name: value for name, value in means.items() if name in {LABELLED, TOKENS, TEXTS}}
        means = {name: value for name, value in means.items() if name not in counts}
        self._accumulated += [count * counts[TOKENS]] if TOKENS in counts else []
        for run in self.runs:
            terms = {name.rpartition("/")[2]: value for name, value in means.items() if name.rpartition("/")[0] == run}
            if run not in self.failed and (bad := [term for term, value in terms.items() if not math.isfinite(value)]):
                self._fail(run, bad[0])
        alive = {name: value for name, value in means.items() if name.rpartition("/")[0] not in self.inactive}
        if alive:
            self.log_training(alive, count, counts)
        else:
            self.trainer.should_stop = True
        return self.idle_parameters()

    def idle_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that take no step now: those of failed and of stopped runs."""
        return self._parameters_of(self.inactive)

    def _fail(self, run: str, term: str) -> None:
        step = self.batches_done
        self.failed[run] = {"step": step, "term": term}
        self._drop_sums(run)
        self.print(f"{run or 'training'} failed at step {step}: its {term} is not finite")

    def _drop_sums(self, run: str) -> None:
        """Leave a run out of the epoch's means, which are over rows that it has not seen; a module's only run stays."""
        self.train_sums = {name: v for name, v in self.train_sums.items() if name.rpartition("/")[0] != run or not run}

    @property
    def epochs_done(self) -> float:
        """Epochs that training has completed."""
        return round(self.batches_done / self.trainer.num_training_batches, 3)

    def stop(self, run: str) -> None:
        """Let a run keep the parameters that it has, on all ranks alike; without any other training ends."""
        done = {"epochs": self.epochs_done, "steps": self.trainer.global_step, "samples": self.samples}
        self.stopped[run] = done
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        if not progress.is_last_batch or progress.current.completed < progress.current.ready:  # in mid-epoch
            self._drop_sums(run)
        self.print(f"{run or 'training'} stopped after {done['epochs']:g} epochs")
        if not self.active_runs:
            self.trainer.should_stop = True

    def on_train_batch_start(self, *_: Any) -> int | None:
        """Keep stopped runs in eval mode, which Lightning changes after a validation; end an epoch without a run."""
        for run in self.stopped:
            self.module_of(run).eval()
        return None if self.active_runs else -1

    def configure_optimizers(self) -> Any:
        self.loss_scales.take_over(getattr(self.attached_trainer, "precision_plugin", None), self.runs)
        optimizer = self._build_optimizer()
        if self.make_scheduler is None:
            return [optimizer], []
        with naming("scheduler"):
            scheduler, by_step = build_scheduler(self.make_scheduler, optimizer, self._length())
        if self.attached_trainer is not None:
            check_steps(scheduler, self._length().steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step" if by_step else "epoch"}]

    def _length(self) -> Length:
        """The length of the attached Trainer's fit."""
        if self.attached_trainer is None:
            return nominal()
        steps = self.trainer.estimated_stepping_batches  # sets up the data, whose batches are counted
        batches = self.trainer.num_training_batches
        of_epoch = 1 if math.isinf(batches) else math.ceil(batches / self.trainer.accumulate_grad_batches)
        return Length(steps, of_epoch)

    def check_optimizer(self, steps: float, steps_per_epoch: int = 1) -> None:
        """Raise BadInput if the optimizer can't take a parameter, or the scheduler does not fit so many steps."""
        optimizer = self._build_optimizer()
        if self.make_scheduler is not None:
            with naming("scheduler"):
                scheduler, _ = build_scheduler(self.make_scheduler, optimizer, Length(steps, steps_per_epoch))
            if self.start is not None and self.start[1] is not None:
                scheduler.load_state_dict(self.start[1])
            check_steps(scheduler, steps)

    def _build_optimizer(self) -> Optimizer:
        """The optimizer of the runs' parameters; BadInput names one that it can't take."""
        self.check_trainable()
        options = self.optimizer_options
        groups = [{"params": group, **options.get(run, {})} for run, group in self.parameter_groups().items()]
        try:
            return self.make_optimizer(groups)
        except ValueError as error:
            for path, parameter in self.named_parameters():
                if parameter.requires_grad:
                    self._try_optimizer(path, parameter)
            raise error from None

    def _try_optimizer(self, path: str, parameter: nn.Parameter) -> None:
        try:
            self.make_optimizer([parameter])
        except ValueError as error:
            name = getattr(getattr(self.make_optimizer, "func", self.make_optimizer), "__name__", "this one")
            shape = f"{path} {tuple(parameter.shape)}"
            raise BadInput("optimizer", name, f"one that takes {shape}; it says: {reason(error)}") from None

    def on_fit_start(self) -> None:
        """Begin with the states of `start`; a checkpoint that is resumed replaces them."""
        if self.start is None:
            return
        optimizer, scheduler = self.start
        self.trainer.strategy.load_optimizer_state_dict({"optimizer_states": [copy.deepcopy(optimizer)]})
        for config in self.trainer.lr_scheduler_configs:
            config.scheduler.load_state_dict(scheduler or {})
            check_steps(config.scheduler, self._length().steps)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip each run's gradients separately: a student's step must not depend on other students."""
        if not gradient_clip_val:
            return
        clip = self.trainer.precision_plugin.clip_gradients  # a strategy that cuts the module may replace it
        for parameters in self.parameter_groups().values():
            run: Any = SimpleNamespace(param_groups=[{"params": parameters}])  # all that it reads of an optimizer
            clip(run, gradient_clip_val, GradClipAlgorithmType(gradient_clip_algorithm or "norm"))

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Drop gradients of runs that overflowed, failed or stopped, so that momentum and weight decay skip them too.

        Callbacks' hooks of this name run before: under 16-mixed they see scaled gradients.
        """
        self._divide_accumulated()
        overflowed: list[str] = []
        if self.loss_scales.scalers:
            alive = {run: group for run, group in self.parameter_groups().items() if run not in self.inactive}
            overflowed = self.loss_scales.unscale(alive, self.trainer.strategy.root_device)
            for run in overflowed:
                if self.loss_scales.scalers[run].get_scale() < HOPELESS:
                    self._fail(run, "gradient")
        for p in [*self.idle_parameters(), *self._parameters_of(overflowed)]:
            p.grad = None
        if self.loggers and self.is_logged(self.global_step + 1):
            self._log_step(optimizer)

    def on_before_backward(self, loss: Tensor) -> None:
        """Weigh the gradients of an accumulated batch of texts by its tokens, over those of the first batch."""
        if self.trainer.accumulate_grad_batches > 1 and loss.requires_grad and any(self._accumulated):
            weight = self._accumulated[-1] / self._first_counted
            if weight != 1:
                loss.register_hook(lambda gradient: gradient * weight)

    @property
    def _first_counted(self) -> float:
        """Tokens of the first accumulated batch that has any."""
        return next(filter(None, self._accumulated))

    def _divide_accumulated(self) -> None:
        """Make the accumulated gradients of texts those of the mean over all of their tokens.

        Lightning has divided each batch's by the number of batches, of which the epoch's last step may have fewer.
        Those of samples stay so, as in torch's usual loop.
        """
        batches, total = self.trainer.accumulate_grad_batches, sum(self._accumulated)
        factor = batches * self._first_counted / total if total and batches > 1 else 1.0
        self._accumulated.clear()
        if factor != 1:
            for p in self._parameters_of(self.runs):
                if p.grad is not None:
                    p.grad.mul_(factor)

    def _log_step(self, optimizer: Optimizer) -> None:
        """Log each run's learning rate and gradient norm, before clipping, by the names that Lightning gives them."""
        norm = getattr(self.trainer.strategy, "gradient_norm", gradient_norm)
        values: dict[str, float | Tensor] = {}
        first_groups = optimizer.param_groups[:: len(optimizer.param_groups) // len(self.runs)]  # of each run
        groups = zip(first_groups, self.parameter_groups().items(), strict=False)
        for group, (run, parameters) in groups:
            values[f"{run}/lr-{type(optimizer).__name__}"] = group["lr"]
            if (total := norm(parameters)) is not None:
                values[f"{run}/grad_2.0_norm_total"] = total
        off = self.inactive
        alive = {name.removeprefix("/"): x for name, x in values.items() if name.rpartition("/")[0] not in off}
        self.log_dict(tags(alive, "train"), batch_size=1)

    def _parameters_of(self, runs: Collection[str]) -> list[nn.Parameter]:
        groups = self.parameter_groups() if runs else {}
        return [p for run in groups if run in runs for p in groups[run]]

    def on_fit_end(self) -> None:
        """Restore the Trainer's loss scale; refuse data without a batch."""
        self.loss_scales.give_back(self.trainer.precision_plugin)
        if not self.trainer.num_training_batches and self.trainer.limit_train_batches:
            expected = "at least one; `drop_last` leaves out a batch that is not full"
            raise BadInput("data", "no training batch", expected)
        batches: Any = self.trainer.fit_loop.epoch_loop.batch_progress.total
        if batches.completed and not batches.started:  # Lightning passes over a batch that is None
            raise BadInput("data", "no training batch", "batches (inputs, labels); each is None")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the running sums of an interrupted epoch, the failed and stopped runs and the loss scales."""
        state = {name: getattr(self, name) for name in self.saved}
        checkpoint["learner"] = state | {"loss_scales": self.loss_scales.state_dict()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = dict(checkpoint["learner"])
        self.loss_scales.load_state_dict(state.pop("loss_scales", {}))
        vars(self).update(state)


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor | None:
    """The norm of all gradients, () float64; None if there are none; collective if they are sharded."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return None
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]))
    norm: Tensor = total.full_tensor() if hasattr(total, "full_tensor") else total
    return norm
