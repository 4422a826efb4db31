"""Distillation of one frozen teacher into any number of students in one pass over the data."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from apprentice import replicas
from apprentice.batch import Batch
from apprentice.errors import BadInput
from lit_modules.learner import Learner, MakeOptimizer, MakeScheduler, adam, prepared
from lit_modules.nets import Outputs, any_kernel, run, typed
from lit_modules.nets.base import layer
from lit_modules.objectives import Objective, Term
from lit_modules.scores import ClassScores, MakeScores
from lit_modules.side_by_side import side_by_side
from lit_modules.student import Student


class Distillation(Learner):
    """Distils a frozen teacher into students, which share only batches, noise and the teacher's outputs.

    Students have disjoint parameters, so the sum of their losses has the gradients of each alone. The teacher is always
    in eval mode, runs once a batch whatever the number of students, and is neither optimised nor saved. A student whose
    loss is no longer finite keeps its parameters and is named in `failed`; the others continue.

    Args:
        teacher: a trained net, inputs (b, ...) -> logits (b, classes).
        students: by name, a net and an objective.
        input_shape: of one input, such as (C, H, W), for objectives whose parts depend on the shapes of features.
        num_classes: number of logits.
        optimizer: makes the optimizer from parameter groups, one a student.
        scheduler: makes a learning-rate scheduler, stepped once an epoch.
        seed: key of the dropout's noise and of the objectives' initial weights.
        teacher_cache_mb: MiB on each rank for the teacher's outputs, which are stored if inputs repeat (a data module
            without augmentation, more than one epoch); with 0, or larger outputs, the teacher runs every batch.
        scores: makes the evaluation scores of a student; `partial(TokenScores, ...)` if nets give logits
            (b, T, classes), a distribution for each token.
        input_dtype: int64 if inputs are tokens.

    Raises:
        BadInput: an objective refuses its nets, gives other than one value a row for a term, or relates rows without
            `relates_rows`; a name or layer can't be used.
    """

    students: Mapping[str, Student]

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
        made = {name: Student(prepared(net), objective) for name, (net, objective) in students.items()}
        self.students = nn.ModuleDict(made)  # type: ignore[assignment]  # it has a mapping's methods
        self.teacher_cache_bytes = teacher_cache_mb * 2**20
        self.cache: Outputs | None = None
        self._storing = False
        self._example = torch.zeros(1, *input_shape, dtype=input_dtype)
        with any_kernel(self):
            self._build(self._example.expand(3, *input_shape))
        self.to(memory_format=torch.channels_last)
        self.register_state_dict_post_hook(_remove_teacher)
        self.register_load_state_dict_post_hook(_allow_missing_teacher)

    @torch.no_grad()
    def _build(self, example: Tensor) -> None:
        for name, student in self.students.items():
            objective, flag = student.objective, f"variants.{name}"
            for option, path in objective.student_layers.items():
                layer(student.net, path, f"{flag}.{option}", objective.needs)
            for option, path in objective.teacher_layers.items():
                layer(self.teacher, path, f"{flag}.{option}")
        teacher = self._ask_teacher(typed(self.teacher, example)) if self.uses_teacher else None
        for name, student in self.students.items():
            student.build(example, teacher, self.seed, f"variants.{name}")

    @property
    def uses_teacher(self) -> bool:
        """Whether any student's objective uses the teacher."""
        return any(student.objective.uses_teacher for student in self.students.values())

    def sharded_modules(self) -> list[nn.Module]:
        """Modules that are called separately, for strategies that shard: teacher, students' nets, objectives' parts."""
        return [self.teacher, *(part for s in self.students.values() for part in (s.net, *s.objective.parts()))]

    def _ask_teacher(self, inputs: Tensor) -> Outputs:
        layers = {path for s in self.students.values() for path in s.objective.teacher_layers.values()}
        with torch.no_grad():
            return run(self.teacher, inputs, layers)

    def train(self, mode: bool = True) -> "Distillation":
        """Set the students' mode; the teacher and failed students stay in eval mode."""
        super().train(mode)
        self.teacher.eval()
        for name in self.failed:
            self.students[name].eval()
        return self

    def _fail(self, run: str, term: str) -> None:
        super()._fail(run, term)
        self.students[run].eval()  # a pipeline still computes it, but must not change its statistics

    def parameter_groups(self) -> list[list[nn.Parameter]]:
        """Each student's parameters, including its objective's."""
        return [[p for p in student.parameters() if p.requires_grad] for student in self.students.values()]

    def forward(self, inputs: Tensor) -> tuple[Outputs | None, dict[str, Outputs]]:
        """Outputs for inputs (b, ...): the teacher's if needed and not cached, and those of all students."""
        teacher, students = self.active()
        asked = self._ask_teacher(inputs) if teacher else None
        return asked, {name: self.students[name](inputs) for name in students if name not in self.failed}

    def active(self) -> tuple[bool, Sequence[str]]:
        """Whether the teacher runs in a forward, and which students."""
        if self._storing:
            return True, ()
        return self.uses_teacher and self.training and self.cache is None, self.runs

    def pipeline_stages(self) -> list[nn.Module]:
        """Teacher and students side by side, each cut into as many pieces as the deepest of them has."""
        return side_by_side(self.teacher, self.students, self.active, self._example)

    def on_train_start(self) -> None:
        """Cache the teacher's outputs if they will be needed again."""
        trainer = self.trainer
        data: Any = getattr(trainer, "datamodule", None)
        repeats = getattr(data, "train_inputs_repeat", False)
        batches = trainer.estimated_stepping_batches * trainer.accumulate_grad_batches
        if not (repeats and self.uses_teacher and self.teacher_cache_bytes and batches > trainer.num_training_batches):
            return
        own = data.train_in_order(replicas.rank(), replicas.count())
        chunks = (data.on_after_batch_transfer(chunk, 0) for chunk in own)
        self._storing = True
        with trainer.precision_plugin.forward_context(), torch.no_grad():
            self.cache = outputs_by_index(chunks, data.sizes["train"], lambda x: self(x)[0], self.teacher_cache_bytes)
        self._storing = False

    def on_train_end(self) -> None:
        """Free the cache."""
        self.cache = None

    def losses(
        self, outputs: tuple[Outputs | None, dict[str, Outputs]], batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the students' losses, and every term of each."""
        teacher = tree_map(lambda x: x[batch.index], self.cache) if self.cache else outputs[0]
        loss = self._zero_of_failed()
        parts: dict[str, Tensor] = {}
        for name, student in self.students.items():
            if name in self.failed:
                continue
            found = outputs[1][name]
            terms = student.objective.terms(found, teacher, batch.labels)
            total = _loss(terms)
            loss = loss + self.loss_scales.scaled(name, batch.mean(total))
            parts |= {f"{name}/{what}": term.values for what, term in terms.items()}
            ce = next((term.values for term in terms.values() if term.is_ce), None)
            measured = self.scores_of(name).per_sample(found.logits, batch.labels, ce)
            parts |= {f"{name}/loss": total, **{f"{name}/{what}": values for what, values in measured.items()}}
        return loss, parts

    def predict(self, inputs: Tensor) -> dict[str, Tensor]:
        """The logits of all students that have not failed."""
        return {name: outputs.logits for name, outputs in self(inputs)[1].items() if name not in self.failed}

    def _zero_of_failed(self) -> Tensor:
        """Zero, with a gradient of zero for every parameter of failed students: DDP waits for each of them."""
        failed = [p for name in self.failed for p in self.students[name].parameters()]
        here = (p for p in failed if type(p) is nn.Parameter and not p.is_meta)  # neither sharded nor on another rank
        zero = torch.zeros((), device=self.device, requires_grad=True)
        return sum((p.sum().nan_to_num() * 0 for p in here), start=zero)

    def step_alone(self, run: str, batch: Batch) -> Callable[[], Tensor]:
        """A step of a copy of one student with its objective's parts; the teacher's outputs are computed beforehand."""
        student = copy.deepcopy(self.students[run]).train()
        teacher = self._ask_teacher(batch.inputs) if self.uses_teacher else None

        def step() -> Tensor:
            student.zero_grad()
            return batch.mean(_loss(student.objective.terms(student(batch.inputs), teacher, batch.labels)))

        return step


def _loss(terms: dict[str, Term]) -> Tensor:
    """(b,) weighted sum of the terms."""
    return sum((term.values * term.weight for term in terms.values()), start=torch.zeros(()))


def outputs_by_index(
    chunks: Iterable[Batch], samples: int, teacher: Callable[[Tensor], Outputs], max_bytes: int
) -> Outputs | None:
    """A frozen teacher's outputs by the sample's index; None if `samples` of them take more than `max_bytes` on a rank.

    Ranks compute chunks of fixed size and order and then share them, so a resumed run gets the same bits.
    """
    store: Outputs | None = None
    for chunk in chunks:
        found = teacher(chunk.inputs)
        if store is None:  # a rank's first chunk may be empty, but has the shapes
            row_bytes = sum(x.new_empty(1, *x.shape[1:]).nbytes for x in tree_leaves(found))
            if row_bytes * samples > max_bytes:
                return None
            store = tree_map(lambda x: x.new_zeros(samples, *x.shape[1:]), found)
        for own, x in zip(tree_leaves(store), tree_leaves(found), strict=True):
            own[chunk.index] = x
    return tree_map(replicas.all_reduce_sum_, store)


def _remove_teacher(_module: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
    for key in [k for k in state if k.startswith(f"{prefix}teacher.")]:
        del state[key]


def _allow_missing_teacher(_module: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [k for k in keys.missing_keys if not k.startswith("teacher.")]
