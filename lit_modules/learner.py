"""What the suite's LightningModules share: optimizers, training means and exact scores."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from lightning import LightningModule
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from apprentice import keyed, replicas
from apprentice.batch import Batch
from apprentice.keyed import Dropout, unkeyed
from lit_modules.loss_scale import LossScales
from lit_modules.nets import globalise
from lit_modules.scores import ClassScores, MakeScores, Scores

MakeOptimizer = Callable[[Iterable], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]


def adam(params: Iterable) -> Optimizer:
    """The tutorial's optimizer: Adam with a learning rate of 0.001."""
    return Adam(params, lr=1e-3)


class Learner(LightningModule):
    """A module that trains one or several runs side by side and logs each under its own name.

    A run's values are logged as `<run>/<stage>/<what>`, or `<stage>/<what>` for the only run of a module.

    Args:
        runs: names of the runs; "" for a module that is one run.
        scores: makes what evaluation counts of a run.
        optimizer: makes the optimizer from parameter groups, one a run.
        scheduler: makes the learning-rate scheduler from the optimizer; stepped once an epoch.
        seed: keys all noise in training.
    """

    def __init__(
        self,
        runs: Iterable[str],
        scores: MakeScores,
        optimizer: MakeOptimizer = adam,
        scheduler: MakeScheduler | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.runs = list(runs)
        self.make_optimizer, self.make_scheduler, self.seed = optimizer, scheduler, seed
        # In the order of the runs: "" can't be the name of a submodule.
        self.scores = nn.ModuleList(scores() for _ in self.runs)
        self.train_sums: dict[str, float] = {}
        self.samples = 0  # seen in training
        self.failed: dict[str, dict[str, Any]] = {}
        self.loss_scales = LossScales()

    def parameter_groups(self) -> list[list[nn.Parameter]]:
        """The trainable parameters of each run."""
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        """One optimizer with a group a run: each run's update depends on its own gradients alone, and its own scale."""
        self.take_over_scales()
        optimizer = self.make_optimizer([{"params": group} for group in self.parameter_groups()])
        return [optimizer], [self.make_scheduler(optimizer)] if self.make_scheduler else []

    def take_over_scales(self) -> None:
        """Scale each run's loss by itself, where the Trainer's precision wants losses to be scaled."""
        if self._trainer is not None:
            self.loss_scales.take_over(self.trainer.precision_plugin, self.runs)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip each run's gradients by its own norm or value: a student's step must not depend on its company."""
        if not gradient_clip_val:
            return
        clip = self.trainer.precision_plugin.clip_gradients  # which a strategy may replace, where it cuts the module
        for parameters in self.parameter_groups():
            run: Any = SimpleNamespace(param_groups=[{"params": parameters}])  # what it asks of an optimizer
            clip(run, gradient_clip_val, GradClipAlgorithmType(gradient_clip_algorithm or "norm"))

    def on_global_batch(self, means: Mapping[str, float], count: int) -> list[nn.Parameter]:
        """Log a global batch; a run of which a value is not finite there has failed, on all ranks alike.

        Args:
            means: over the global batch, `<run>/<what>` to value.
            count: rows of the global batch.

        Returns:
            The parameters of the runs that have failed, which take no step any more.
        """
        for run in self.runs:
            own = {name: value for name, value in means.items() if name.rpartition("/")[0] == run}
            if run not in self.failed and (bad := [name for name, value in own.items() if not math.isfinite(value)]):
                self._fail(run, bad[0].rpartition("/")[2])
        alive = {name: value for name, value in means.items() if name.rpartition("/")[0] not in self.failed}
        if alive:
            self.log_training(alive, count)
        else:
            self.trainer.should_stop = True
        return self._parameters_of(self.failed)

    def _fail(self, run: str, term: str) -> None:
        step = self.batches_done
        self.failed[run] = {"step": step, "term": term}
        self.train_sums = {name: v for name, v in self.train_sums.items() if name.rpartition("/")[0] != run or not run}
        self.print(f"{run or 'training'} failed at step {step}: its {term} is not finite")

    def _parameters_of(self, runs: Collection[str]) -> list[nn.Parameter]:
        if not runs:
            return []
        groups = zip(self.runs, self.parameter_groups(), strict=True)
        return [p for run, group in groups if run in runs for p in group]

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """A run that overflows or has failed has no gradient: momentum and weight decay leave it alone as well.

        Callbacks' hooks of this name come before: under 16-mixed they see gradients that are still scaled.
        """
        overflowed = self._unscale() if self.loss_scales.scalers else []
        for p in self._parameters_of({*self.failed, *overflowed}):
            p.grad = None

    def _unscale(self) -> list[str]:
        groups = zip(self.runs, self.parameter_groups(), strict=True)
        alive = {run: group for run, group in groups if run not in self.failed}
        overflowed = self.loss_scales.unscale(alive, self.trainer.strategy.root_device)
        for run in filter(self.loss_scales.hopeless, overflowed):
            self._fail(run, "gradient")
        return overflowed

    def on_fit_end(self) -> None:
        """Leave the Trainer as it was."""
        self.loss_scales.give_back(self.trainer.precision_plugin)

    def log_training(self, values: Mapping[str, float], count: int) -> None:
        """Log the global batch's means (`<run>/<what>` to value), and add them to the epoch's."""
        self.samples += count
        for name, value in {**values, "rows": 1.0}.items():
            self.train_sums[name] = self.train_sums.get(name, 0.0) + value * count
        # Every value costs 0.2 ms of Lightning's time: nothing is handed over that it would not write.
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (self.global_step + 1) % every == 0:
            self.log_dict(_tags(values, "train"), batch_size=count)
            shown = {what: [v for k, v in values.items() if k.endswith(what)] for what in ("loss", "acc")}
            bar = {what: sum(found) / len(found) for what, found in shown.items() if found}
            self.log_dict(bar, prog_bar=True, logger=False, batch_size=count)

    def on_train_epoch_end(self) -> None:
        """Log the epoch's means over samples, as the tutorials print them."""
        rows = self.train_sums.pop("rows", 0.0)
        if rows:
            self._log_epoch({f"{k}_epoch": v / rows for k, v in self.train_sums.items()}, "train")
        self.train_sums = {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the running means of an epoch that is cut in two, who has failed, and the scales."""
        checkpoint["learner"] = {"train_sums": self.train_sums, "samples": self.samples, "failed": self.failed}
        checkpoint["learner"]["loss_scales"] = self.loss_scales.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take them up again."""
        state = {"loss_scales": {}, **checkpoint["learner"]}
        self.loss_scales.load_state_dict(state.pop("loss_scales"))
        for name, value in state.items():
            setattr(self, name, value)

    def log_scores(self, stage: str) -> None:
        """Log each run's scores of a whole evaluation, and draw its confusion matrix after the test."""
        for run in self.runs:
            if run in self.failed:
                continue
            scores = self.scores_of(run)
            values = scores.compute()
            if stage != "test":
                values.pop("correct", None)
            self._log_epoch({f"{run}/{k}" if run else k: v for k, v in values.items()}, stage)
            if stage == "test" and isinstance(scores, ClassScores):
                self._report_classes(run, scores.confusion.compute())

    def scores_of(self, run: str) -> Scores:
        """What evaluation counts of a run."""
        return cast("Scores", self.scores[self.runs.index(run)])

    def _log_epoch(self, values: Mapping[str, Any], stage: str) -> None:
        # The values are the same on all ranks: the maximum is each of them, to the bit, where a mean would round.
        self.log_dict(_tags(values, stage), sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)

    def _report_classes(self, run: str, confusion: Tensor) -> None:
        for logger in self.loggers:
            if hasattr(logger, "log_confusion"):
                names = getattr(self.trainer.datamodule, "class_names", None)  # type: ignore[attr-defined]
                logger.log_confusion(run, confusion.cpu(), names, self.global_step)

    def on_validation_epoch_start(self) -> None:
        """Count from zero; here, as a tensor made in another loop's inference mode can't be added to."""
        for scores in self.scores:
            scores.reset()  # type: ignore[operator]

    def on_test_epoch_start(self) -> None:
        """Count from zero."""
        self.on_validation_epoch_start()

    @property
    def batches_done(self) -> int:
        """Batches that training has behind it; `global_step` is the same for all that an optimizer step accumulates."""
        if self._trainer is None:
            return 0
        # Of Lightning's counts the one that is right after any resume.
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.completed

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """This rank's part of the loss: of all runs together."""
        batch = Batch.of(batch, self.batches_done)
        loss, parts = self.shard_step(batch)
        self.on_global_batch(global_means(parts, batch), batch.count)
        return loss

    def shard_step(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and per-sample values of some rows of a global batch; keeps no state.

        A strategy that computes a batch in pieces calls this for each, and `on_global_batch` once.

        Args:
            batch: b rows.

        Returns:
            This batch's part of the loss; (b,) tensors by `<run>/<what>`.
        """
        batch = Batch.of(batch, self.batches_done)
        with keyed.noise(self.seed, batch.step, batch.rows):
            outputs = self(batch.inputs)
        return self.losses(outputs, batch)

    def losses(self, outputs: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """What `shard_step` returns, of what `forward` gave for the batch's inputs."""
        raise NotImplementedError

    def pipeline_stages(self) -> list[nn.Module]:
        """Modules in order whose composition is `forward`, for a pipeline strategy.

        Raises:
            BadInput: a net can't be cut.
        """
        raise NotImplementedError

    def pipeline_loss(self, output: Any, batch: Any) -> Tensor:
        """The loss of some rows, of what the last stage gave for them."""
        return self.losses(output, Batch.of(batch, self.batches_done))[0]

    def predict(self, inputs: Tensor) -> dict[str, Tensor]:
        """Logits (b, ..., classes) of each run that is still in the race, for inputs (b, ...)."""
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Count a validation batch."""
        self._count(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Count a test batch."""
        self._count(batch)

    def _count(self, batch: Any) -> None:
        batch = Batch.of(batch, 0, shared=False)
        for run, logits in self.predict(batch.inputs).items():
            self.scores_of(run).update(logits, batch.labels)

    def on_validation_epoch_end(self) -> None:
        """Log what validation counted."""
        self.log_scores("val")

    def on_test_epoch_end(self) -> None:
        """Log what the test counted."""
        self.log_scores("test")

    def step_alone(self, run: str, batch: Batch) -> Callable[[], Tensor]:
        """A step of one run alone, on a copy, to measure what it costs; what it needs of others is given.

        It clears gradients, computes forward and returns the loss; backward is left to the caller.
        """
        raise NotImplementedError


def step_of(net: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The loss of a net whose gradients are cleared before, as an optimizer does: adding to old ones takes time."""

    def step() -> Tensor:
        net.zero_grad()
        return loss()

    return step


def prepared(net: nn.Module) -> nn.Module:
    """The net with BatchNorm over the global batch; one warning names layers whose noise is torch's, not keyed.

    Their draws depend on the device count, on what else is trained in the process, and on where a run was resumed.
    """
    keyed_layers = [m for m in net.modules() if isinstance(m, Dropout)]
    if len({m.layer for m in keyed_layers}) < len(keyed_layers):
        for number, module in enumerate(keyed_layers):
            module.layer = number  # else two layers of one width would draw one mask
    if names := unkeyed(net):
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        advice = "without --exact numbers move with the device count and a resume; apprentice.keyed.Dropout's do not"
        rank_zero_warn(f"{type(net).__name__} draws noise from torch's generator in {listed}: {advice}")
    return globalise(net)


def _tags(values: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """`kd/loss` -> `kd/train/loss`, `loss` -> `train/loss`."""
    return {"/".join([*name.split("/")[:-1], stage, name.split("/")[-1]]): value for name, value in values.items()}


def global_means(parts: Mapping[str, Tensor], batch: Batch) -> dict[str, float]:
    """Means over the global batch of per-sample tensors (b,), with one message for all of them; 64-bit sums."""
    if not parts:
        return {}
    sums = replicas.all_reduce_sum(torch.stack([values.detach().double().sum() for values in parts.values()]))
    return dict(zip(parts, (sums / batch.count).tolist(), strict=True))
