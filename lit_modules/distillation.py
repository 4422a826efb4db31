"""Distillation of one frozen teacher into any number of students in one pass over the data."""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from apprentice import keyed
from apprentice.batch import Batch
from apprentice.errors import BadInput, naming
from apprentice.replicas import FEWEST_ROWS
from lit_modules.checkpoints import keep_runs, without
from lit_modules.learner import MakeOptimizer, MakeScheduler, adam
from lit_modules.nets import Ensemble, Outputs, any_kernel, globalise, has_no_running_statistics, run
from lit_modules.nets.classes import check_classes
from lit_modules.nets.layers import input_names, layer
from lit_modules.nets.other_tokens import OtherTokens
from lit_modules.nets.recorded import Spec, rebuild
from lit_modules.nets.stored import Absent, NoTeacher, StoredTeacher
from lit_modules.nets.token_head import run_before_head
from lit_modules.objectives import Objective, Place
from lit_modules.objectives.base import average_labelled, condense_teacher
from lit_modules.prepared import prepare_net
from lit_modules.scored import ScoredBesideTeacher
from lit_modules.side_by_side import side_by_side
from lit_modules.stored_teacher import Stored, TextStore
from lit_modules.student import CE, Student, check_features, check_parameters, choose_layers, list_kept, zero_of
from lit_modules.tasks import LABELLED, Classification, Task, Tokens
from lit_modules.teacher import leave_out_of_state, make_cache, trained_teacher
from lit_modules.token_losses import InChunks


class Distillation(ScoredBesideTeacher):
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
        scheduler: makes a learning-rate scheduler, as Learner steps it.
        seed: key of the dropout's noise and of the objectives' initial weights.
        teacher_cache_mb: MiB on each rank for the teacher's outputs, which are stored if inputs repeat (a data module
            without augmentation, more than one epoch); with 0, larger outputs, or a teacher whose outputs for a sample
            depend on its batch, the teacher runs every batch.
        teacher_cache_dir: a folder that keeps them, and what the teacher writes, for other runs with the same teacher
            and data.
        stored: of texts, what is kept there of the teacher's distribution for each token that counts; then later runs
            read it, and the teacher may be a `StoredTeacher`.
        task: what a label is; `Tokens()` if nets give logits (b, T, classes), a distribution for each token; default:
            `Classification`.
        input_dtype: int64 if inputs are tokens.
        samples: in the training set, if batches name their samples by `index`.
        labelled: whether all of them have labels; if not, batches have a `label_weight`.
        teacher_weights: a file of the teacher's weights, to load: checkpoints have its class and arguments alone.
        ema: decay of a moving average of each student's weights, which is validated and tested beside them.
        loss_chunk: of texts, for how many tokens logits are held at once; 0: for all of a batch; default:
            128 if there are 4,096 tokens or more in the vocabulary.
        end_tokens: of texts, tokens that end a response which a student writes.
        optimizer_options: of students whose options are not the optimizer's own, such as {"kd": {"lr": 0.1}}.

    Raises:
        BadInput: an objective refuses its nets, gives other than one value a row for a term, or relates rows without
            `relates_rows`; a name, a layer or a peer can't be used. When a Trainer begins: the teacher's classes, by
            their names, are not those of the data, or in another order.
    """

    students: Mapping[str, Student]
    has_teacher = True
    saved = (*ScoredBesideTeacher.saved, "teacher_samples", "teacher_stored")

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
        stored: Stored | None = None,
        task: Task | None = None,
        input_dtype: torch.dtype = torch.float32,
        samples: int | None = None,
        labelled: bool = True,
        teacher_weights: str | Path | None = None,
        optimizer_options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        ema: float | None = None,
        loss_chunk: int | None = None,
        end_tokens: Sequence[int] = (),
    ) -> None:
        frozen = trained_teacher(teacher, teacher_weights)
        if isinstance(frozen, Absent | OtherTokens):
            self.has_teacher = False  # as a test knows nothing of it
        super().__init__(students, task or Classification(num_classes), optimizer, scheduler, seed)
        for name in students:
            if hasattr(nn.ModuleDict(), name) or "." in name:
                raise BadInput("variants", name, "a name without dots that is no attribute of torch's ModuleDict")
        self.optimizer_options = dict(optimizer_options)  # the default can't be copied or pickled
        self.teacher, self._storing = frozen, False
        self._batch_norms = {  # of the teacher, those by which its outputs for a sample depend on the batch
            name: globalise(m) for name, m in self.teacher.named_modules() if has_no_running_statistics(m)
        }
        self._example = torch.zeros(1, *input_shape, dtype=rebuild(input_dtype))
        by_name = {name: self._student(name, *rebuild(pair, f"students.{name}")) for name, pair in students.items()}
        self.students = nn.ModuleDict(by_name)  # type: ignore[assignment]  # it has a mapping's methods
        check_parameters(self.teacher, self.students)
        kept = teacher_cache_mb, teacher_cache_dir, stored
        self.cache = make_cache(frozen, self._objectives, num_classes, self.print, *kept)
        self._chunks = InChunks(
            loss_chunk, num_classes if isinstance(self.task, Tokens) and self.task.has_chunks else 0
        )
        self.teacher_samples = 0  # that the teacher has computed in training; again after a resume they count once
        self.teacher_stored = False  # whether its outputs were stored, and so computed once for all epochs
        self._epoch, self._whole = math.inf, math.inf  # batches of an epoch, and of the whole training
        self._samples, self._labelled = samples, labelled
        with any_kernel(self):
            self._build(self._example.expand(3, *input_shape))
            self.generations_dir = teacher_cache_dir
            self.check_writers(self._example.dtype, end_tokens)
        self.average_runs(ema)
        self.train()
        self.to(memory_format=torch.channels_last)
        averages = [f"averages.{key}" for key in self.averages.state_dict()]
        self._ddp_params_and_buffers_to_ignore = [*list_kept(self), *averages]
        leave_out_of_state(self)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        names = getattr(getattr(self.trainer, "datamodule", None), "class_names", ())
        check_classes(self.teacher, names, "teacher")

    def _student(self, name: str, net: nn.Module, objective: Objective) -> Student:
        with naming(f"variants.{name}"):
            wrap = partial(objective.wrap, net, self.teacher, self._example)
            return Student(prepare_net(keyed.with_seed(self.seed, wrap)), objective)

    @torch.no_grad()
    def _build(self, example: Tensor) -> None:
        """Let the objectives make their parts, given example inputs; the students' layers are settled first."""
        choose_layers(self.teacher, self.students)
        self.cache.check(self._objectives)
        asking = [name for name, objective in self._objectives.items() if objective.uses_teacher]
        if asking and isinstance(self.teacher, NoTeacher):
            raise BadInput("teacher", "None", f"a teacher, which variants.{asking[0]} learns from")
        teacher = self._run_teacher(example) if asking else None
        for name, student in self.students.items():
            beside = {peer: self.students[peer].eval() for peer in student.objective.peers}
            peers = {peer: other.raw(example) for peer, other in beside.items()}
            flag = f"variants.{name}"
            if teacher is not None:
                check_features(teacher, student.objective.teacher_layers, flag)
            outputs = teacher and teacher.match_dtype(student.net)
            student.build(example, outputs, self.seed, flag, self._samples, self._labelled, peers)
            self.of_labels |= {f"{name}/{what}" for what in (*student.of_labels, *self.scores_of(name).trained)}
        self._chunks.choose(self.teacher, self.students, example)

    @property
    def _objectives(self) -> dict[str, Objective]:
        return {name: student.objective for name, student in self.students.items()}

    @property
    def _teacher_layers(self) -> set[str]:
        members = self.teacher.member_layers if isinstance(self.teacher, Ensemble) else ()
        return {*members, *(path for o in self._objectives.values() for path in o.teacher_layers.values())}

    @property
    def relates_rows(self) -> bool:
        """Whether any student's objective relates rows of the global batch; strategies that can't do so refuse it."""
        relates = any(o.relates_rows for name, o in self._objectives.items() if name not in self.inactive)
        return relates or super().relates_rows

    @property
    def fewest_rows(self) -> int:
        """Rows of a shard under `--exact`: of images as many as BatchNorm needs, which company may have."""
        return FEWEST_ROWS if self._example.is_floating_point() else 1

    @property
    def uses_teacher(self) -> bool:
        return any(self.students[name].objective.uses_teacher for name in self.active_runs)

    def sharded_modules(self) -> list[nn.Module]:
        """Modules that are called separately, for strategies that shard: teacher, students' nets, objectives' parts."""
        averages = [net for net in map(self.average_of, self.runs) if net is not None]
        parts = [part for s in self.students.values() for part in (*s.objective.parts(), s.net)]  # some are the net's
        teachers = [] if isinstance(self.teacher, Absent) else [self.teacher]
        return [*teachers, *averages, *parts]

    def read_layers(self) -> list[tuple[nn.Module, bool]]:
        """The layers whose outputs, or inputs where that is true, objectives read, for strategies that cut layers."""
        nets = [(self.teacher, self._teacher_layers)]
        nets += [(s.net, {*s.objective.student_layers.values()}) for s in self.students.values()]
        return [(layer(net, name), name in input_names(net, names)) for net, names in nets for name in names]

    def _ask_teacher(self, inputs: Tensor, whole: bool = False) -> Outputs:
        with torch.no_grad():
            if (head := self.teacher_head()) is not None:
                return run_before_head(self.teacher, head, inputs)
            if isinstance(self.cache, TextStore):
                return condense_teacher(self._run_teacher(inputs), self._objectives)
            chunks = self._chunks if self.training and not (self._storing or whole) else InChunks(0, 0)
            outputs, hidden = chunks.run_teacher(self.teacher, inputs, self._teacher_layers)
            return condense_teacher(outputs, self._objectives).with_features(hidden)

    def _run_teacher(self, inputs: Tensor) -> Outputs:
        if isinstance(self.teacher, StoredTeacher):  # for checks and costs of shapes alone: training reads the file
            return Outputs(self.teacher.zeros(inputs), {})
        return run(self.teacher, inputs, self._teacher_layers)

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

    def _fail(self, run: str, term: str) -> None:
        super()._fail(run, term)
        self.students[run].eval()  # a pipeline still computes it, but must not change its statistics
        for name, objective in self._objectives.items():
            if name not in self.failed and run in objective.peers:
                self._fail(name, f"peer {run}")

    def net_of(self, run: str) -> nn.Module:
        return self.students[run].net

    def module_of(self, run: str) -> nn.Module:
        return self.students[run]

    def peers_of(self, run: str) -> list[str]:
        return list(self.students[run].objective.peers)

    def names_of(self, run: str, names: Iterable[str]) -> list[str]:
        return [name for name in names if name.startswith((f"students.{run}.", f"averages.{run}."))]

    def forward(self, inputs: Tensor) -> tuple[Outputs | None, dict[str, Outputs]]:
        """Outputs for inputs (b, ...): the teacher's if needed and not cached, and those of all students."""
        teacher, students = self.active()
        taught = self._ask_teacher(inputs) if teacher else None
        return taught, {name: self.students[name](inputs) for name in students if name not in self.inactive}

    def active(self) -> tuple[bool, Sequence[str]]:
        """Whether the teacher runs in a forward, and which students."""
        if self._storing:
            return True, ()
        others = [run for run in self.runs if run not in self.writers()]
        uses = any(self.students[run].objective.uses_teacher for run in others if run not in self.inactive)
        return (uses and self.training and not self.cache.is_filled) or self._comparing, others

    def pipeline_stages(self) -> list[nn.Module]:
        """Teacher and students side by side, each cut into as many pieces as the deepest of them has."""
        return side_by_side(self.teacher, self.students, self.active, self._example)

    def on_train_start(self) -> None:
        """Cache the teacher's outputs if they will be needed again."""
        super().on_train_start()
        trainer = self.trainer
        self._epoch = trainer.num_training_batches
        self._whole = trainer.estimated_stepping_batches * trainer.accumulate_grad_batches
        data: Any = getattr(trainer, "datamodule", None)
        if not (self.uses_teacher and self.cache.is_wanted(data, self._whole / self._epoch)):
            return
        if self._batch_norms:
            name = next(iter(self._batch_norms)) or type(self.teacher).__name__
            self.print(f"teacher's outputs are not stored: they depend on the batch, by its statistics in {name}")
            return
        self._storing = True
        with trainer.precision_plugin.forward_context(), torch.no_grad():
            computed = self.cache.fill(data, lambda chunk: self(chunk.inputs)[0], trainer)
        self._storing = False
        if self.cache.is_filled:
            self.teacher_samples, self.teacher_stored = max(self.teacher_samples, computed), True

    def on_train_end(self) -> None:
        self.cache.clear()
        self.written_ahead.clear()

    def on_global_batch(self, means: Mapping[str, float], count: int) -> list[nn.Parameter]:
        """Also count what the teacher computes, and check the size of the first batch."""
        if not self.batches_done:
            self.check_batch(count)
        self.teacher_samples += count * self.passes()
        return super().on_global_batch(means, count)

    def idle_parameters(self) -> list[nn.Parameter]:
        """Also those of nets of which an objective trains a part for now."""
        resting = [student for student in self.students.values() if not student.objective.trains_all()]
        trained = {p for student in resting for part in student.objective.parts() for p in part.parameters()}
        parameters = [p for student in resting for p in student.net.parameters() if p not in trained]
        return [*super().idle_parameters(), *parameters]

    def check_batch(self, count: int) -> None:
        """Raise BadInput if an objective relates rows and its terms have no gradient in global batches of `count`."""
        for objective in self._objectives.values():
            if count < objective.fewest_related:
                why = f"{type(objective).__name__} relates samples, and relations of fewer have no gradient"
                raise BadInput("data.batch_size", count, f"at least {objective.fewest_related}: {why}")

    def check_packed(self) -> None:
        """Raise BadInput if an objective compares rows, which hold several texts each, and not their tokens."""
        for name, student in self.students.items():
            student.check_packed(name)

    @staticmethod
    def keep_students(checkpoint: dict[str, Any], students: Sequence[str], kept: Collection[str]) -> None:
        """Leave in a checkpoint of these students, in the order of their groups, that from which some go on alone."""
        dropped = [name for name in students if name not in kept]
        for part in ("students.", "averages."):
            checkpoint["state_dict"] = without(checkpoint["state_dict"], dropped, part, ".")
        keep_runs(checkpoint, students, kept)
        ahead = checkpoint["learner"]["written_ahead"]
        ahead = {name: written for name, written in ahead.items() if name in kept}
        checkpoint["learner"] |= {"teacher_samples": 0, "written_ahead": ahead}

    def losses(
        self, outputs: tuple[Outputs | None, dict[str, Outputs]], batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        teacher, students = outputs
        if self.cache.is_filled and not batch.is_written:
            teacher = self.cache.rows(batch)
        if students:
            self.check_labels(next(iter(students.values())).logits, batch)
        parts = self.task.counts(batch)
        if self._labelled and LABELLED in parts:
            raise BadInput("labelled", True, "labelled=False, as the data hides labels")
        loss = zero_of((self.students[name] for name in self.inactive), self.device)
        active = {name: self.students[name] for name in self.active_runs if name in students}
        losses = self._chunks.losses(active, students, (teacher, self.teacher), batch, self._place(batch))
        for name, (part, total, values) in losses.items():
            loss = loss + self.loss_scales.scaled(name, part)
            measured = self.scores_of(name).per_label(students[name].logits, batch.labels, values.pop(CE, None))
            measured = {what: average_labelled(x, batch.labels, batch.label_weight) for what, x in measured.items()}
            parts |= {f"{name}/{what}": x for what, x in {**values, "loss": total, **measured}.items()}
        return loss, parts

    def _place(self, batch: Batch) -> Place:
        done = self.batches_done
        epoch, progress, rows = done / self._epoch, done / self._whole, (batch.index, batch.rows, batch.count)
        return Place(done, epoch, progress, *rows, self._samples, is_written=batch.is_written)

    def copy_student(self, run: str) -> Student:
        """A copy of a student, in training mode, whose steps are measured."""
        return copy.deepcopy(self.students[run]).train()

    def steps_alone(self, run: str, batch: Batch) -> list[tuple[float, Callable[[], Tensor]]]:
        """Steps of one copy of a student with its objective's parts; the outputs of others are computed beforehand."""
        student = self.copy_student(run)
        parts = self.parts_alone(run, batch)
        uses = student.objective.uses_teacher
        taught = [
            self.cache.reduce(self._ask_teacher(part.inputs, whole=True), part) if uses else None for part in parts
        ]
        with torch.no_grad():  # of copies, as running statistics change
            peers = {peer: copy.deepcopy(self.students[peer])(batch.inputs) for peer in student.objective.peers}

        def step(progress: float) -> Tensor:
            student.zero_grad()
            loss = torch.zeros((), device=self.device)
            for part, teacher in zip(self.parts_alone(run, batch), taught, strict=True):
                outputs = {run: student(part.inputs), **peers}
                place = self._place(part)._replace(progress=progress)
                losses = self._chunks.losses({run: student}, outputs, (teacher, self.teacher), part, place)
                loss = loss + losses[run].part
            return loss

        return [(share, partial(step, progress)) for share, progress in student.objective.phases()]

    def step_alone(self, run: str, batch: Batch) -> Callable[[], Tensor]:
        """The first of `steps_alone`."""
        return self.steps_alone(run, batch)[0][1]
