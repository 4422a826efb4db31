"""Distillation of one frozen teacher into any number of students in one pass over the data."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from apprentice.batch import Batch
from apprentice.contract import ModuleLayout
from apprentice.errors import BadInput
from apprentice.replicas import FEWEST_ROWS
from lit_modules.nets.attention.form import any_kernel
from lit_modules.nets.base import Net
from lit_modules.nets.batch_norm import globalise, has_no_running_statistics
from lit_modules.nets.classes import check_classes
from lit_modules.nets.layers import input_names, layer
from lit_modules.nets.outputs import UNLABELLED, Outputs
from lit_modules.nets.specs import Spec, rebuild
from lit_modules.nets.stored import TeacherInFile, TeacherWithoutWeights
from lit_modules.objectives.base import Objective, average_labelled
from lit_modules.objectives.context import StepContext, call
from lit_modules.tasks import LABELLED, Classification, Task
from lit_modules.training.averages import WeightAverages
from lit_modules.training.extras import extras_of_nets
from lit_modules.training.loop import Loop
from lit_modules.training.objective_checks import build_students
from lit_modules.training.optimization import MakeOptimizer, MakeScheduler, Optimization, adam
from lit_modules.training.run_scores import evaluated_part
from lit_modules.training.side_by_side import side_by_side
from lit_modules.training.student import CE, Student, choose_layers, make_students, replicated_buffer_names, zero_loss
from lit_modules.training.teacher import exclude_teacher_from_state_dict, layers_read, store_outputs, trained_teacher
from lit_modules.training.timed_steps import timed_steps
from lit_modules.training.whole_outputs import ForwardRequest, Predictions, Purpose


class Distillation(Loop):
    """Distils a frozen teacher into students, which share only batches, noise and the teacher's outputs.

    Students have disjoint parameters, so the sum of their losses has the gradients of each alone. The teacher is always
    in eval mode, runs once a batch whatever the number of students, and is neither optimised nor saved. Its BatchNorm
    layers without running statistics use those of the global batch in training. A student whose loss is no longer
    finite keeps its parameters and is named in `failed`; the others continue.

    Args:
        teacher: a trained net, inputs (b, ...) -> logits (b, classes), or its class and arguments; None where
            students learn from labels alone.
        students: by name, a net and an objective.
        input_shape: of one input, such as (C, H, W), for objectives whose parts depend on the shapes of features.
        num_classes: number of logits.
        optimizer: makes the optimizer from parameter groups, one a student.
        scheduler: makes a learning-rate scheduler, as `Optimization` steps it.
        seed: key of the dropout's noise and of the objectives' initial weights.
        teacher_cache_mb: MiB on each rank for the teacher's outputs, which are stored if inputs repeat (a data module
            without augmentation, more than one epoch); with 0, larger outputs, or a teacher whose outputs for a sample
            depend on its batch, the teacher runs every batch.
        teacher_cache_dir: a folder that keeps what the teacher gives for other runs with the same teacher and data.
        task: what a label is; it names the parts of training that its kind of data needs; default: `Classification`.
        input_dtype: that of inputs.
        samples: in the training set, if batches name their samples by `index`.
        labelled: whether all of them have labels; if not, batches have a `label_weight`.
        teacher_weights: a file of the teacher's weights, to load: checkpoints have its class and arguments alone.
        ema: decay of a moving average of each student's weights, which is validated and tested beside them.
        optimizer_options: of students whose options are not the optimizer's own, such as {"kd": {"lr": 0.1}}.
        optimization: in place of optimizer, scheduler and their options.
        options: of the task's parts, such as `lit_modules.text.parts.TextParts`.

    Raises:
        BadInput: an objective refuses its nets, gives other than one value a row for a term, or relates rows without
            `relates_rows`; a name, a layer or a peer can't be used. When a Trainer begins: the teacher's classes, by
            their names, are not those of the data, or in another order.
    """

    students: Mapping[str, Student]
    has_teacher = True
    saved = (*Loop.saved, "teacher_samples", "teacher_stored", "batches_planned")

    def __init__(
        self,
        teacher: nn.Module | Spec | None,
        students: Mapping[str, tuple[nn.Module, Objective] | Sequence[Spec]],
        input_shape: tuple[int, ...] = (3, 32, 32),
        num_classes: int = 10,
        optimizer: MakeOptimizer = adam,
        scheduler: MakeScheduler | None = None,
        seed: int = 0,
        teacher_cache_mb: int = 1024,
        teacher_cache_dir: str | Path | None = None,
        task: Task | None = None,
        input_dtype: torch.dtype = torch.float32,
        samples: int | None = None,
        labelled: bool = True,
        teacher_weights: str | Path | None = None,
        optimizer_options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        ema: float | None = None,
        optimization: Optimization | None = None,
        **options: Any,
    ) -> None:
        frozen = trained_teacher(teacher, teacher_weights)
        if isinstance(frozen, Net) and not frozen.is_comparable:
            self.has_teacher = False  # as a test knows nothing of it
        optimization = optimization or Optimization(optimizer, scheduler, optimizer_options)
        super().__init__(students, task or Classification(num_classes), optimization, seed, **options)
        self.teacher = frozen
        self._batch_norms = {  # of the teacher, those by which its outputs for a sample depend on the batch
            name: globalise(m) for name, m in self.teacher.named_modules() if has_no_running_statistics(m)
        }
        self._example = torch.zeros(1, *input_shape, dtype=rebuild(input_dtype))
        by_name = make_students(students, frozen, self._example, seed)
        self.students = cast("Mapping[str, Student]", nn.ModuleDict(by_name))  # which has a mapping's methods
        self.objectives = {name: student.objective for name, student in self.students.items()}
        self.cache = self.parts.teacher_outputs(
            frozen, self.objectives, num_classes, teacher_cache_mb, teacher_cache_dir, self.print
        )
        self.teacher_samples = 0  # that the teacher has computed in training; again after a resume they count once
        self.teacher_stored = False  # whether its outputs were stored, and so computed once for all epochs
        self.epoch_batches, self.batches_planned = math.inf, math.inf  # of an epoch, and of the whole training
        self._samples, self._labelled = samples, labelled
        with any_kernel(self):
            example = self._example.expand(3, *input_shape)
            choose_layers(frozen, self.students)
            self.cache.set_objectives(self.objectives)
            self.teacher_layers = layers_read(frozen, self.objectives)
            ask = partial(self.outputs.ask, frozen, example, self.teacher_layers)
            build_students(self.students, frozen, ask, example, seed, self.task.outputs, samples, labelled)
            self.outputs.choose(frozen, self.students, example, num_classes)
            batches = self.parts.batches(self.students, frozen, self._example, teacher_cache_dir, seed, self.print)
        for name, student in self.students.items():
            values = *student.of_labels, *self.scores_of(name).trained
            self.training_log.labelled_only |= {f"{name}/{what}" for what in values}
        averages = [] if ema is None else [WeightAverages(self, ema)]
        self.averages = averages[0].averages if averages else nn.ModuleDict()
        self.extras = [*batches, *extras_of_nets(self), *self.parts.extras(), *averages]
        self.train()
        self.to(memory_format=torch.channels_last)
        names = [f"averages.{key}" for key in self.averages.state_dict()]
        self._ddp_params_and_buffers_to_ignore = [*replicated_buffer_names(self), *names]
        exclude_teacher_from_state_dict(self)

    # ---- what it is made of

    def net_of(self, run: str) -> nn.Module:
        return self.students[run].net

    def module_of(self, run: str) -> nn.Module:
        return self.students[run]

    def average_of(self, run: str) -> nn.Module | None:
        """The net with the averages of a run's weights, if there are any."""
        return cast("AveragedModel", self.averages[run]).module if run in self.averages else None

    def peers_of(self, run: str) -> list[str]:
        return list(self.objectives[run].peers)

    def names_of(self, run: str, names: Iterable[str]) -> list[str]:
        return [name for name in names if name.startswith((f"students.{run}.", f"averages.{run}."))]

    def find_layout(self) -> ModuleLayout:
        """Teacher, students' nets, averages and objectives' parts are called separately."""
        base = super().find_layout()
        averages = [net for net in map(self.average_of, self.runs) if net is not None]
        parts = [part for s in self.students.values() for part in (*s.objective.parts(), s.net)]  # some are the net's
        teachers = [] if isinstance(self.teacher, TeacherWithoutWeights) else [self.teacher]
        nets = [(self.teacher, self.teacher_layers)]
        nets += [(s.net, {*s.objective.student_layers.values()}) for s in self.students.values()]
        relates = any(o.relates_rows for name, o in self.objectives.items() if name not in self.inactive)
        return replace(
            base, sharded=[*teachers, *averages, *parts], relates_rows=relates or base.relates_rows,
            read_layers=[(layer(net, name), name in input_names(net, names)) for net, names in nets for name in names],
            fewest_rows=FEWEST_ROWS if self._example.is_floating_point() else 1,  # company may have BatchNorm
        )  # fmt: skip

    def pipeline_stages(self) -> list[nn.Module]:
        """Teacher and students side by side, each cut into as many pieces as the deepest of them has."""
        return side_by_side(self.teacher, self.students, self.step_request, self._example)

    def train(self, mode: bool = True) -> "Distillation":
        """Set the students' mode; the teacher and inactive students stay in eval mode."""
        super().train(mode)
        self.teacher.eval()
        self.averages.eval()
        for norm in self._batch_norms.values():
            norm.train(mode)  # with the global batch's statistics; chunks of an evaluation stand for themselves
        for name in self.inactive:
            self.students[name].eval()
        return self

    def fail(self, run: str, term: str) -> None:
        """Let those who learn from a failed run fail with it."""
        super().fail(run, term)
        self.students[run].eval()  # a pipeline still computes it, but must not change its statistics
        for name, objective in self.objectives.items():
            if name not in self.failed and run in objective.peers:
                self.fail(name, f"peer {run}")

    # ---- a forward

    def forward(
        self, inputs: Tensor, *beside: Tensor, request: ForwardRequest | None = None
    ) -> tuple[Outputs | None, dict[str, Outputs]]:
        """Outputs for inputs (b, ...) of the teacher and of students; without a request, what a step learns from."""
        request = request or self.step_request()
        teacher = self.ask_teacher(inputs, request.purpose, beside) if request.teacher else None
        students = [name for name in request.students if name not in self.inactive]
        run = self.outputs.run_student
        return teacher, {name: run(name, self.students[name], inputs, beside, request.purpose) for name in students}

    @torch.no_grad()
    def ask_teacher(self, inputs: Tensor, purpose: Purpose = "all", beside: Sequence[Tensor] = ()) -> Outputs:
        """Run the teacher on inputs (b, ...); return what students' losses, or scores, are computed from."""
        layers, objectives = self.teacher_layers, self.objectives
        return self.outputs.run_teacher(self.teacher, inputs, beside, layers, objectives, purpose)

    def step_request(self) -> ForwardRequest:
        """What a step learns from: the teacher's outputs if needed and not stored, and those of students."""
        elsewhere = self.runs_elsewhere()
        students = [run for run in self.runs if run not in elsewhere]  # a pipeline computes those that failed, too
        uses = any(self.objectives[run].uses_teacher for run in students if run not in self.inactive)
        purpose: Purpose = "losses" if self.training else "all"
        return ForwardRequest(uses and self.training and not self.cache.is_filled, students, purpose)

    def predict(self, inputs: Tensor) -> dict[str, Tensor]:
        _, students = self(inputs, request=ForwardRequest(False, self.runs))
        return {name: x.logits for name, x in students.items() if name not in self.inactive}

    def evaluate(self, batch: Batch, beside: bool) -> Predictions[Outputs]:
        """What evaluation scores, also of averages, and of the teacher if `beside` it."""
        beside, inputs = beside and self.has_teacher, batch.inputs
        stored = self.teacher if beside and isinstance(self.teacher, TeacherInFile) else None
        teacher, students = self(inputs, request=ForwardRequest(beside and stored is None, self.runs, "scores"))
        if stored is not None:
            teacher = stored.rows(evaluated_part(self.attached_trainer), batch.index)
        averages = {name: net for name in self.active_runs if (net := self.average_of(name)) is not None}
        return Predictions(
            teacher if beside else None,
            {name: x for name, x in students.items() if name not in self.inactive},
            {name: self.outputs.run_average(name, net, inputs) for name, net in averages.items()},
        )

    # ---- a training step

    def losses(
        self, outputs: tuple[Outputs | None, Mapping[str, Outputs]], batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        teacher, students = outputs
        if self.cache.is_filled and not batch.is_written:
            teacher = self.cache.rows(batch)
        if students:
            self.reader.check_labels(next(iter(students.values())).logits, batch, self.training)
        parts = self.task.counts(batch)
        if self._labelled and LABELLED in parts:
            raise BadInput("labelled", True, "labelled=False, as the data hides labels")
        loss = zero_loss((self.students[name] for name in self.inactive), self.device)
        active = {name: self.students[name] for name in self.active_runs if name in students}
        losses = self.outputs.losses(active, students, teacher, batch, self.context(batch))
        for name, (part, total, values) in losses.items():
            loss = loss + self.loss_scales.scaled(name, part)
            # Where a head was left out, its cross-entropies are known.
            measured = self.scores_of(name).per_label(students[name].logits, batch.labels, values.pop(CE, None))
            measured = {what: average_labelled(x, batch.labels, batch.label_weight) for what, x in measured.items()}
            parts |= {f"{name}/{what}": x for what, x in {**values, "loss": total, **measured}.items()}
        return loss, parts

    def context(self, batch: Batch | None = None) -> StepContext:
        """Where training is, and which rows a batch has."""
        done = self.batches_done
        progress = done / self.epoch_batches, done / self.batches_planned
        has_labels, loss = self.task.outputs not in UNLABELLED, self.task.loss_of_labels
        context = StepContext(done, *progress, samples=self._samples, has_labels=has_labels, loss=loss)
        if batch is None:
            return context
        return replace(context, index=batch.index, rows=batch.rows, count=batch.count, is_written=batch.is_written)

    def on_global_batch(self, means: Mapping[str, float], count: int) -> list[nn.Parameter]:
        """Also count what the teacher computes, and check the size of the first batch."""
        if not self.batches_done:
            self.check_batch(count)
        elsewhere = [self.students[run].objective for run in self.runs_elsewhere()]
        self.teacher_samples += count * (self.step_request().teacher + sum(o.uses_teacher for o in elsewhere))
        return super().on_global_batch(means, count)

    def idle_parameters(self) -> list[nn.Parameter]:
        """Also those of nets of which an objective trains a part for now."""
        students, context = self.students.values(), self.context()
        resting = [student for student in students if not call(student.objective.trains_all, context=context)]
        trained = {p for student in resting for part in student.objective.parts() for p in part.parameters()}
        parameters = [p for student in resting for p in student.net.parameters() if p not in trained]
        return [*super().idle_parameters(), *parameters]

    # ---- checks before training

    def check_batch(self, count: int) -> None:
        """Raise BadInput if an objective relates rows and its terms have no gradient in global batches of `count`."""
        for objective in self.objectives.values():
            if count < objective.fewest_related:
                why = f"{type(objective).__name__} relates samples, and relations of fewer have no gradient"
                raise BadInput("data.batch_size", count, f"at least {objective.fewest_related}: {why}")

    # ---- the teacher's outputs for all samples

    def on_fit_start(self) -> None:
        super().on_fit_start()
        names = getattr(getattr(self.trainer, "datamodule", None), "class_names", ())
        check_classes(self.teacher, names, "teacher")

    def on_train_start(self) -> None:
        """Stop who learns nothing; store the teacher's outputs if they will be needed again."""
        super().on_train_start()
        for name, objective in self.objectives.items():
            if not objective.learns and name not in self.inactive:
                self.stop(name)
        trainer = self.trainer
        self.epoch_batches = trainer.num_training_batches
        self.batches_planned = trainer.estimated_stepping_batches * trainer.accumulate_grad_batches
        if any(self.objectives[name].uses_teacher for name in self.active_runs):
            store_outputs(self, self.batches_planned / self.epoch_batches, next(iter(self._batch_norms), None))

    def on_train_end(self) -> None:
        super().on_train_end()
        self.cache.clear()

    def timed_steps(self, run: str, batch: Batch) -> dict[float, Callable[[], Tensor]]:
        """Steps of one copy of a student with its objective's parts; the outputs of others are computed beforehand."""
        return timed_steps(self, run, batch)
