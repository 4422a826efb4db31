"""The base of the suite's LightningModules: trains one or several runs at the same time."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from apprentice import keyed
from apprentice.batch import Batch
from apprentice.contract import ModuleLayout
from lit_modules.nets.outputs import Outputs
from lit_modules.nets.specs import rebuild, record_arguments
from lit_modules.tasks.base import COUNTS, Task
from lit_modules.tasks.scores import Scores
from lit_modules.training.batches import BatchReader, check_trained, require_batch
from lit_modules.training.checkpoints import load_parts, save_parts
from lit_modules.training.extras import Extra
from lit_modules.training.loss_scale import LossScales
from lit_modules.training.optimization import Optimization, log_optimizer
from lit_modules.training.parts import parts_of
from lit_modules.training.run_scores import RunScores
from lit_modules.training.training_log import TrainingLog, global_means, is_logged, not_finite
from lit_modules.training.whole_outputs import Predictions


class Loop(LightningModule):
    """Trains one or several runs, such as the students of a distillation, which do not affect each other.

    Each run has a parameter group, a gradient norm and a loss scale of its own. A run with a loss or gradient that is
    not finite has failed: its parameters no longer change, and `failed` names it. A module that is one run calls it "".

    What differs from loop to loop, or comes with the kind of data, is held: `optimization`, `outputs` (how nets give
    outputs, and losses and scores are made of these) and `extras`.

    Attributes:
        failed: runs that have failed, with the step and the term.
        stopped: runs that have stopped before the others, with the epochs and samples that they have trained.
        init_args: the constructor's arguments, as plain data, which are a checkpoint's hyperparameters.
        has_teacher: whether a test compares runs with a teacher.
        batches_planned: in the whole training, as far as a module asks how far it is.
        saved: attributes that a checkpoint holds, beside those of the parts.

    Args:
        runs: their names.
        task: what a label is, and what runs are scored by.
        optimization: how they are optimized.
        seed: key of the noise in nets.
        options: of the parts that the task chooses.
    """

    init_args: dict[str, Any]
    has_teacher = False
    batches_planned: float = math.inf
    saved: tuple[str, ...] = ("failed", "stopped")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        record_arguments(cls)

    def __init__(
        self, runs: Iterable[str], task: Task, optimization: Optimization, seed: int = 0, **options: Any
    ) -> None:
        super().__init__()
        self.save_hyperparameters(vars(self).get("init_args", {}))
        self.runs, self.seed, self.optimization = list(runs), seed, optimization
        self.task: Task = rebuild(task, "task")
        self.parts = parts_of(self.task, options)
        self.reader, self.training_log = BatchReader(self.task), TrainingLog()
        self.run_scores = RunScores(self.runs, self.task, self.has_teacher)
        self.loss_scales = LossScales()
        self.outputs, self.extras = self.parts.outputs(), list[Extra[Any]]()
        self.failed: dict[str, dict[str, Any]] = {}
        self.stopped: dict[str, dict[str, Any]] = {}
        self._layout: tuple[set[str], ModuleLayout] | None = None  # while these runs are inactive

    # ---- what a module is made of

    def net_of(self, run: str) -> nn.Module:
        raise NotImplementedError

    def module_of(self, run: str) -> nn.Module:
        """What of a run is trained: its net, perhaps with parts of an objective."""
        return self.net_of(run)

    def peers_of(self, run: str) -> list[str]:
        """Other runs that a run learns from."""
        return []

    def names_of(self, run: str, names: Iterable[str]) -> list[str]:
        """Those of the names in the module's state that are of a run."""
        return list(names)

    def losses(self, outputs: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The result of `shard_step`, given the output of `forward` for the batch's inputs."""
        raise NotImplementedError

    def predict(self, inputs: Tensor) -> dict[str, Tensor]:
        """Logits (b, ..., classes) of each run that is active, for inputs (b, ...)."""
        raise NotImplementedError

    def evaluate(self, batch: Batch, beside: bool) -> Predictions[Outputs]:
        """What evaluation scores: outputs of the active runs, also of a teacher if `beside` it."""
        return Predictions(None, {run: Outputs(logits, {}) for run, logits in self.predict(batch.inputs).items()}, {})

    def timed_steps(self, run: str, batch: Batch) -> dict[float, Callable[[], Tensor]]:
        """Steps of a copy of one run, for each part of its training with a cost of its own, by where it begins.

        A step clears gradients, as adding to old ones takes time, and returns the loss; the caller runs backward. What
        it needs of other runs is computed beforehand.
        """
        raise NotImplementedError

    # ---- runs

    @property
    def inactive(self) -> set[str]:
        """Runs that are not computed: those that failed and, during a fit, those that have stopped."""
        trainer = self.attached_trainer
        fits = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        return {*self.failed, *(self.stopped if fits else ())}

    @property
    def active_runs(self) -> list[str]:
        inactive = self.inactive
        return [run for run in self.runs if run not in inactive]

    def scores_of(self, run: str) -> Scores:
        """The evaluation scores of a run."""
        return self.run_scores.of(run)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """The trainable parameters of each run."""
        return {run: [p for p in self.module_of(run).parameters() if p.requires_grad] for run in self.runs}

    def parameters_of(self, runs: Collection[str]) -> list[nn.Parameter]:
        groups = self.parameter_groups() if runs else {}
        return [p for run in groups if run in runs for p in groups[run]]

    def idle_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that take no step now: those of failed and of stopped runs."""
        return self.parameters_of(self.inactive)

    def runs_elsewhere(self) -> set[str]:
        """The runs that learn from other batches than the data's in this step."""
        return {run for extra in self.extras for run in extra.runs_elsewhere(self)}

    def fail(self, run: str, term: str) -> None:
        """Let a run keep the parameters that it has, as a term is not finite."""
        step = self.batches_done
        self.failed[run] = {"step": step, "term": term}
        self.training_log.drop(run)
        self.print(f"{run or 'training'} failed at step {step}: its {term} is not finite")

    def stop(self, run: str) -> None:
        """Let a run keep the parameters that it has, on all ranks alike; without any other training ends."""
        done = {"epochs": self.epochs_done, "samples": self.training_log.samples}
        self.stopped[run] = done
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        if not progress.is_last_batch or progress.current.completed < progress.current.ready:  # in mid-epoch
            self.training_log.drop(run)
        self.print(f"{run or 'training'} stopped after {done['epochs']:g} epochs")
        if not self.active_runs:
            self.trainer.should_stop = True

    def check_data(self, data: Any) -> None:
        """Raise BadInput if a run can't learn from a data module."""
        for extra in self.extras:
            extra.check_data(self, data)

    # ---- where training is

    @property
    def attached_trainer(self) -> Trainer | None:
        """The Trainer that runs the module, if one does."""
        try:
            trainer = self.trainer
        except RuntimeError:
            return None
        return trainer if isinstance(trainer, Trainer) else None  # under Fabric there is a stand-in

    @property
    def batches_done(self) -> int:
        """Batches that training has completed; `global_step` counts optimizer steps, each of several batches."""
        if self.attached_trainer is None:
            return 0
        # The only one of Lightning's counts that is right after any resume.
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.completed

    @property
    def epochs_done(self) -> float:
        """Epochs that training has completed."""
        return round(self.batches_done / self.trainer.num_training_batches, 3)

    # ---- a training step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """This rank's part of the loss of all runs."""
        batch = self.reader.read(batch, self.batches_done)
        loss, parts = self.shard_step(batch)
        self.on_global_batch(global_means(parts, batch), batch.count)
        return loss

    def shard_step(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The part of the loss, and (b,) values by `<run>/<what>`, of b rows of a global batch; changes no state.

        A strategy that splits a batch calls this for each part, and `on_global_batch` once.
        """
        batch = self.rows_of(batch)
        with ExitStack() as stack:
            more_losses = [stack.enter_context(extra.watch(self, batch)) for extra in self.extras]
            stack.enter_context(keyed.noise(self.seed, batch.step, batch.rows))
            stack.enter_context(self.reader.naming_inputs(batch.inputs))
            outputs = self(batch.inputs, *self.outputs.beside(batch))
        loss, values = self.losses(outputs, batch)
        for added in [part for losses in reversed(more_losses) for part in losses()]:  # the first to watch adds last
            loss, values = loss + added.loss, values | added.values
        return loss, values

    def layout(self) -> ModuleLayout:
        """Tell strategies what the module consists of and needs; it changes where a run fails or stops."""
        inactive = self.inactive
        if self._layout is None or self._layout[0] != inactive:
            self._layout = inactive, self.find_layout()
        return self._layout[1]

    def find_layout(self) -> ModuleLayout:
        """Find out what `layout` returns."""
        layout = ModuleLayout(seed=self.seed)
        for extra in self.extras:
            layout = extra.add_to_layout(self, layout)
        return layout

    def pipeline_loss(self, output: Any, batch: Any) -> Tensor:
        """The loss of some rows, given the last stage's output for them."""
        return self.losses(output, self.rows_of(batch))[0]

    def rows_of(self, batch: Any) -> Batch:
        """Return some rows of a global batch, or all."""
        return self.reader.read_rows(batch, self.batches_done)

    def on_global_batch(self, means: Mapping[str, float], count: int) -> list[nn.Parameter]:
        """Log a global batch of `count` rows by its means, `<run>/<what>` to value.

        A run with a value that is not finite has failed, on all ranks alike. Returns those of `idle_parameters`.
        """
        counts = {name: value for name, value in means.items() if name in COUNTS}
        means = {name: value for name, value in means.items() if name not in counts}
        size = self.task.batch_size(count, counts)
        elsewhere = {run: n for extra in self.extras for run, n in extra.sizes_elsewhere(self).items()}
        for extra in self.extras:
            extra.on_global_batch(self, size)
        for run, term in not_finite(means, self.runs).items():
            if run not in self.failed:
                self.fail(run, term)
        alive = {name: value for name, value in means.items() if name.rpartition("/")[0] not in self.inactive}
        if alive:
            self.training_log.add(self, alive, size, elsewhere)
        else:
            self.trainer.should_stop = True
        return self.idle_parameters()

    # ---- Lightning's hooks

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Inspect a batch on the CPU, before a strategy cuts it in shards.

        Lightning calls the public hook of this name on the data module alone, where that has one.
        """
        batch = super()._on_before_batch_transfer(batch, dataloader_idx)
        if self.attached_trainer is not None and not self.attached_trainer.predicting:
            self.reader.inspect(batch, self)
        return batch

    def configure_optimizers(self) -> Any:
        self.loss_scales.take_over(getattr(self.attached_trainer, "precision_plugin", None), self.runs)
        return self.optimization.configure(self)

    def on_fit_start(self) -> None:
        self._layout = None
        self.optimization.on_fit_start(self)

    def on_train_start(self) -> None:
        for extra in self.extras:
            extra.on_train_start(self)

    def on_train_batch_start(self, *_: Any) -> int | None:
        """Keep stopped runs in eval mode, which Lightning changes after a validation; end an epoch without a run."""
        for extra in self.extras:
            extra.on_batch_start(self)
        for run in self.stopped:
            self.module_of(run).eval()
        return None if self.active_runs else -1

    def on_before_backward(self, loss: Tensor) -> None:
        for extra in self.extras:
            extra.on_before_backward(self, loss)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Drop gradients of runs that overflowed, failed or stopped, so that momentum and weight decay skip them too.

        Callbacks' hooks of this name run before: under 16-mixed they see scaled gradients.
        """
        for extra in self.extras:
            extra.before_step(self)
        overflowed = self.loss_scales.unscale_runs(self) if self.loss_scales.scalers else []
        for p in [*self.idle_parameters(), *self.parameters_of(overflowed)]:
            p.grad = None
        if self.loggers and is_logged(self, self.global_step + 1):
            log_optimizer(self, optimizer)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        self.optimization.clip(self, gradient_clip_val, gradient_clip_algorithm)

    def on_train_batch_end(self, *_: Any) -> None:
        for extra in self.extras:
            extra.after_batch(self)

    def on_train_epoch_end(self) -> None:
        self.training_log.end_epoch(self)

    def on_train_end(self) -> None:
        for extra in self.extras:
            extra.on_train_end(self)

    def on_fit_end(self) -> None:
        """Restore the Trainer's loss scale; refuse data without a batch."""
        self.loss_scales.give_back(self.trainer.precision_plugin)
        check_trained(self.trainer)

    # ---- evaluation

    def on_validation_epoch_start(self) -> None:
        self.run_scores.reset("val")

    def on_test_epoch_start(self) -> None:
        self.run_scores.reset("test")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        batch = Batch.of(require_batch(batch), 0, shared=False)
        self.run_scores.score(self, batch, beside=self.task.beside_teacher)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        batch = Batch.of(require_batch(batch), 0, shared=False)
        self.run_scores.add_samples(batch, self.run_scores.score(self, batch, beside=True))

    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Tensor | dict[str, Tensor]:
        """Logits (b, ..., classes) of a batch, of inputs alone too; of several runs by their names."""
        inputs = batch.inputs if isinstance(batch, Batch) else batch[0] if isinstance(batch, list | tuple) else batch
        logits = self.predict(inputs)
        return logits.get("", logits)

    def on_validation_epoch_end(self) -> None:
        self.run_scores.log(self, "val")

    def on_test_epoch_end(self) -> None:
        self.run_scores.log(self, "test")

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the running sums of an interrupted epoch, the failed and stopped runs and the loss scales."""
        save_parts(checkpoint, [self, self.training_log, *self.extras])
        checkpoint["learner"]["loss_scales"] = self.loss_scales.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loss_scales.load_state_dict(checkpoint["learner"].get("loss_scales", {}))
        load_parts(checkpoint, [self, self.training_log, *self.extras])
