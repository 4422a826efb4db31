"""One frozen teacher, any number of students, one pass over the data."""

import copy
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from apprentice import keyed, replicas
from apprentice.batch import Batch
from apprentice.errors import BadInput
from lit_modules.learner import Learner, MakeOptimizer, MakeScheduler, adam, prepared, step_of
from lit_modules.nets import Outputs, any_kernel, globalise, layer, run, typed
from lit_modules.objectives import Objective, Term
from lit_modules.objectives.trial import check_rows
from lit_modules.scores import ClassScores, MakeScores
from lit_modules.side_by_side import side_by_side
from lit_modules.teacher_cache import TeacherCache

EXAMPLES = 3  # inputs on which objectives are tried


class Student(nn.Module):
    """A net and the objective it learns by; the objective's own parameters train along and are not exported."""

    def __init__(self, net: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.net, self.objective = net, objective

    def forward(self, inputs: Tensor) -> Outputs:
        """Logits (b, classes), and the features that the objective compares."""
        return self.objective.adapt(self.raw(inputs))

    def raw(self, inputs: Tensor) -> Outputs:
        """Logits (b, classes), and the features that the objective asks for."""
        return run(self.net, inputs, set(self.objective.student_layers.values()))


class Distillation(Learner):
    """Distils a frozen teacher into students that share batches, noise and the teacher's outputs, and nothing else.

    Students have disjoint parameters, so the sum of their losses has the gradients of each alone. The teacher is always
    in eval mode, runs once a batch whatever the number of students, and is neither optimised nor saved. A student whose
    loss stops being finite keeps the parameters it had, and is named in `failed`; the others go on.

    Args:
        teacher: a trained net, inputs (b, ...) -> logits (b, classes).
        students: by name, a net and an objective.
        input_shape: of one input, as (C, H, W), for objectives whose own parts depend on features' shapes.
        num_classes: number of logits.
        optimizer: makes the optimizer from parameter groups, one a student.
        scheduler: makes a learning-rate scheduler, stepped once an epoch.
        seed: keys the dropout's noise and the objectives' initial weights.
        teacher_cache_mb: MiB a rank may spend on the teacher's outputs, which are stored where inputs repeat (a data
            module without augmentation, more than one epoch); 0, or outputs too large, runs the teacher every batch.
        scores: makes what evaluation counts of a student; `partial(TokenScores, ...)` where nets give logits
            (b, T, classes), a distribution for each token.
        input_dtype: int64 where inputs are tokens.

    Raises:
        BadInput: an objective refuses its pair of nets, has not one value a row for each term, or relates rows without
            saying so; a name or layer can't be used.
    """

    def __init__(
        self,
        teacher: nn.Module,
        students: Mapping[str, tuple[nn.Module, Objective]],
        input_shape: tuple[int, ...] = (3, 32, 32),
        num_classes: int = 10,
        optimizer: MakeOptimizer = adam,
        scheduler: MakeScheduler | None = None,
        seed: int = 0,
        teacher_cache_mb: int = 1024,
        scores: MakeScores | None = None,
        input_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(students, scores or partial(ClassScores, num_classes), optimizer, scheduler, seed)
        for name in students:
            if hasattr(nn.ModuleDict, name) or "." in name:
                raise BadInput("variants", name, "a name without dots that is no attribute of torch's ModuleDict")
        self.teacher = teacher.requires_grad_(False).eval()
        self.students = nn.ModuleDict({name: Student(prepared(net), obj) for name, (net, obj) in students.items()})
        self.teacher_cache_bytes = teacher_cache_mb * 2**20
        self.cache: TeacherCache | None = None
        self._storing = False
        self._example = torch.zeros(1, *input_shape, dtype=input_dtype)
        with any_kernel(self):
            self._build(self._example)
        self.to(memory_format=torch.channels_last)
        self.register_state_dict_post_hook(_without_teacher)
        self.register_load_state_dict_post_hook(_teacher_not_missing)

    @torch.no_grad()
    def _build(self, example: Tensor) -> None:
        """Let each objective make its parts, from the seed and the shapes alone, and try it."""
        self._check_layers()
        example = example.expand(EXAMPLES, *example.shape[1:])
        teacher = self._ask_teacher(typed(self.teacher, example)) if self.uses_teacher else None
        for name, student in self._students(()):
            mode, objective = student.training, student.objective
            outputs = student.eval().raw(typed(student.net, example))
            try:
                keyed.with_seed(self.seed, partial(objective.build, outputs, teacher))
            except BadInput as fault:
                raise BadInput(f"variants.{name}.{fault.flag}", fault.value, fault.expected) from None
            globalise(objective.to(outputs.logits.dtype))
            check_rows(objective, outputs, teacher, f"variants.{name}")
            if objective.relates_rows:
                advice = "its numbers move with the device count"
                rank_zero_warn(f"variants.{name}: {type(objective).__name__} relates rows that a device has; {advice}")
            student.train(mode)

    def _check_layers(self) -> None:
        for name, student in self._students(()):
            for flag, path in student.objective.student_layers.items():
                layer(student.net, path, f"variants.{name}.{flag}", student.objective.needs)
            for flag, path in student.objective.teacher_layers.items():
                layer(self.teacher, path, f"variants.{name}.{flag}")

    @property
    def uses_teacher(self) -> bool:
        """Whether any student's objective looks at the teacher."""
        return any(student.objective.uses_teacher for _, student in self._students(()))

    def sharded_modules(self) -> list[nn.Module]:
        """What is called by itself, for strategies that shard: teacher, students' nets, parts of their objectives."""
        students = [student for _, student in self._students(())]
        return [self.teacher, *(part for s in students for part in (s.net, *s.objective.parts()))]

    def _student(self, name: str) -> Student:
        return cast("Student", self.students[name])

    def _students(self, but: Container[str]) -> list[tuple[str, Student]]:
        return [(name, self._student(name)) for name in self.runs if name not in but]

    def _ask_teacher(self, inputs: Tensor) -> Outputs:
        layers = {path for _, s in self._students(()) for path in s.objective.teacher_layers.values()}
        with torch.no_grad():
            return run(self.teacher, inputs, layers)

    def train(self, mode: bool = True) -> "Distillation":
        """Put the students in the given mode; the teacher, and who has failed, stays in eval mode."""
        super().train(mode)
        self.teacher.eval()
        for name in self.failed:
            self._student(name).eval()
        return self

    def _fail(self, run: str, term: str) -> None:
        super()._fail(run, term)
        self._student(run).eval()  # in a pipeline it is computed on, but nothing of it changes

    def parameter_groups(self) -> list[list[nn.Parameter]]:
        """Each student's parameters, its objective's included."""
        return [[p for p in student.parameters() if p.requires_grad] for _, student in self._students(())]

    def forward(self, inputs: Tensor) -> tuple[Outputs | None, dict[str, Outputs]]:
        """Outputs for inputs (b, ...): of the teacher where they are needed and not stored, and of all students."""
        teacher, students = self.active()
        asked = self._ask_teacher(inputs) if teacher else None
        return asked, {name: self._student(name)(inputs) for name in students if name not in self.failed}

    def active(self) -> tuple[bool, Sequence[str]]:
        """Who takes part in a forward: whether the teacher, and which students."""
        if self._storing:
            return True, ()
        return self.uses_teacher and self.training and self.cache is None, self.runs

    def pipeline_stages(self) -> list[nn.Module]:
        """Teacher and students side by side, each cut into as many pieces as the deepest of them has."""
        return side_by_side(self.teacher, {name: self._student(name) for name in self.runs}, self.active, self._example)

    def on_train_start(self) -> None:
        """Store the teacher's outputs where they will be asked for again."""
        trainer = self.trainer
        data: Any = getattr(trainer, "datamodule", None)
        repeats = getattr(data, "train_inputs_repeat", False)
        batches = trainer.estimated_stepping_batches * trainer.accumulate_grad_batches
        if not (repeats and self.uses_teacher and self.teacher_cache_bytes and batches > trainer.num_training_batches):
            return
        dealt = data.train_in_order(replicas.rank(), replicas.count())
        chunks = (data.on_after_batch_transfer(chunk, 0) for chunk in dealt)
        self._storing = True
        with trainer.precision_plugin.forward_context(), torch.no_grad():
            self.cache = TeacherCache.fill(
                chunks, data.sizes["train"], lambda inputs: self(inputs)[0], self.teacher_cache_bytes
            )
        self._storing = False

    def on_train_end(self) -> None:
        """Give the stored outputs' memory back."""
        self.cache = None

    def losses(
        self, outputs: tuple[Outputs | None, dict[str, Outputs]], batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The students' losses, and every term of each."""
        teacher = self.cache[batch.index] if self.cache else outputs[0]
        loss = self._anchor()
        parts: dict[str, Tensor] = {}
        for name, student in self._students(self.failed):
            found = outputs[1][name]
            terms = student.objective.terms(found, teacher, batch.labels)
            total = _loss(terms)
            loss = loss + self.loss_scales.scaled(name, batch.mean(total))
            parts |= {f"{name}/{what}": term.values for what, term in terms.items()}
            ce = next((term.values for term in terms.values() if term.is_ce), None)
            measured = self.scores_of(name).of_each(found.logits, batch.labels, ce)
            parts |= {f"{name}/loss": total, **{f"{name}/{what}": values for what, values in measured.items()}}
        return loss, parts

    def predict(self, inputs: Tensor) -> dict[str, Tensor]:
        """The logits of all students that have not failed."""
        return {name: outputs.logits for name, outputs in self(inputs)[1].items() if name not in self.failed}

    def _anchor(self) -> Tensor:
        """Zero, with a gradient of zero for every frozen parameter: DDP waits for each of them."""
        frozen = [p for name in self.failed for p in self.students[name].parameters()]
        awaited = (p for p in frozen if type(p) is nn.Parameter and not p.is_meta)  # not sharded, and not elsewhere
        zero = torch.zeros((), device=self.device, requires_grad=True)
        return sum((p.sum().nan_to_num() * 0 for p in awaited), start=zero)

    def step_alone(self, run: str, batch: Batch) -> Callable[[], Tensor]:
        """A step of a copy of one student, its objective's parts included; the teacher's outputs are given."""
        student = copy.deepcopy(self._student(run)).train()
        teacher = self._ask_teacher(batch.inputs) if self.uses_teacher else None

        def loss() -> Tensor:
            return batch.mean(_loss(student.objective.terms(student(batch.inputs), teacher, batch.labels)))

        return step_of(student, loss)


def _loss(terms: dict[str, Term]) -> Tensor:
    """(b,) weighted sum of the terms."""
    return sum((term.values * term.weight for term in terms.values()), start=torch.zeros(()))


def _without_teacher(_module: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
    for key in [k for k in state if k.startswith(f"{prefix}teacher.")]:
        del state[key]


def _teacher_not_missing(_module: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [k for k in keys.missing_keys if not k.startswith("teacher.")]
