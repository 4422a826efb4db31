"""Distillation of one frozen teacher into any number of students in one pass over the data."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from apprentice import keyed, replicas
from apprentice.batch import Batch, Mixed, counted
from apprentice.errors import BadInput, naming
from apprentice.private import tree_map
from apprentice.relations import related
from apprentice.replicas import FEWEST_ROWS
from lit_modules.learner import Learner, MakeOptimizer, MakeScheduler, adam, prepared
from lit_modules.nets import (
    Ensemble,
    Outputs,
    any_kernel,
    giving_logits,
    globalise,
    has_no_running_statistics,
    in_type_of,
    run,
)
from lit_modules.nets.classes import check_classes
from lit_modules.nets.ensemble import MEMBERS
from lit_modules.nets.layers import layer, of_inputs
from lit_modules.nets.recorded import Spec, made
from lit_modules.nets.weights import load_weights
from lit_modules.objectives import Objective, Place
from lit_modules.objectives.base import condensed, masked, of_labelled, shown, viewed, weighted_sum, wide
from lit_modules.run_metrics import ACCURACY
from lit_modules.side_by_side import side_by_side
from lit_modules.stored import Kept, outputs_by_index, sizes
from lit_modules.student import Student
from lit_modules.tasks import LABELLED, Classification, Task

CE = "cross-entropy"  # of the logits with the labels, whatever the term's name


class Distillation(Learner):
    """Distils a frozen teacher into students, which share only batches, noise and the teacher's outputs.

    Students have disjoint parameters, so the sum of their losses has the gradients of each alone. The teacher is always
    in eval mode, runs once a batch whatever the number of students, and is neither optimised nor saved. Its BatchNorm
    layers without running statistics use those of the global batch in training. A student whose loss is no longer
    finite keeps its parameters and is named in `failed`; the others continue.

    Args:
        teacher: a trained net, inputs (b, ...) -> logits (b, classes), or its class and arguments.
        students: by name, a net and an objective.
        input_shape: of one input, such as (C, H, W), for objectives whose parts depend on the shapes of features.
        num_classes: number of logits.
        optimizer: makes the optimizer from parameter groups, one a student.
        scheduler: makes a learning-rate scheduler, as Learner steps it.
        seed: key of the dropout's noise and of the objectives' initial weights.
        teacher_cache_mb: MiB on each rank for the teacher's outputs, which are stored if inputs repeat (a data module
            without augmentation, more than one epoch); with 0, larger outputs, or a teacher whose outputs for a sample
            depend on its batch, the teacher runs every batch.
        teacher_cache_dir: a folder that keeps them for other runs with the same teacher and data.
        task: what a label is; `Tokens()` if nets give logits (b, T, classes), a distribution for each token; default:
            `Classification`.
        input_dtype: int64 if inputs are tokens.
        samples: in the training set, if batches name their samples by `index`.
        labelled: whether all of them have labels; if not, batches have a `label_weight`.
        teacher_weights: a file of the teacher's weights, to load: checkpoints have its class and arguments alone.
        optimizer_options: of students whose options are not the optimizer's own, such as {"kd": {"lr": 0.1}}.

    Raises:
        BadInput: an objective refuses its nets, gives other than one value a row for a term, or relates rows without
            `relates_rows`; a name, a layer or a peer can't be used. When a Trainer begins: the teacher's classes, by
            their names, are not those of the data, or in another order.
    """

    students: Mapping[str, Student]
    has_teacher = True

    def __init__(
        self,
        teacher: nn.Module | Spec,
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
    ) -> None:
        super().__init__(students, task or Classification(num_classes), optimizer, scheduler, seed)
        for name in students:
            if hasattr(nn.ModuleDict(), name) or "." in name:
                raise BadInput("variants", name, "a name without dots that is no attribute of torch's ModuleDict")
        self.optimizer_options = dict(optimizer_options)  # the default can't be copied or pickled
        self.teacher = _trained(teacher, teacher_weights).requires_grad_(False).eval()
        self._batch_norms = {  # of the teacher, those by which its outputs for a sample depend on the batch
            name: globalise(m) for name, m in self.teacher.named_modules() if has_no_running_statistics(m)
        }
        self._example = torch.zeros(1, *input_shape, dtype=made(input_dtype))
        each = {name: self._student(name, *made(of, f"students.{name}")) for name, of in students.items()}
        self.students = nn.ModuleDict(each)  # type: ignore[assignment]  # it has a mapping's methods
        self._check_parameters()
        self.teacher_cache_bytes = teacher_cache_mb * 2**20
        self.cache: Outputs | None = None
        self._kept = Kept(teacher_cache_dir, self.teacher, self.print) if teacher_cache_dir else None
        self._storing, self._comparing = False, False
        self.asked = 0  # samples that the teacher has computed in training; again after a resume they count once
        self.stored = False  # whether its outputs were stored, and so computed once for all epochs
        self._epoch, self._whole = math.inf, math.inf  # batches of an epoch, and of the whole training
        self._samples, self._labelled = samples, labelled
        with any_kernel(self):
            self._build(self._example.expand(3, *input_shape))
        self.train()
        self.to(memory_format=torch.channels_last)
        # What objectives keep is the same on every rank; DDP would send it before each forward.
        self._ddp_params_and_buffers_to_ignore = [
            f"{path}.{key}"
            for path, module in self.named_modules()
            if isinstance(module, Objective)
            for key, _ in module.named_buffers(recurse=False)
        ]
        self.register_state_dict_post_hook(_remove_teacher)
        self.register_load_state_dict_post_hook(_allow_missing_teacher)

    def on_fit_start(self) -> None:
        """Raise BadInput if the teacher has other classes than the data, by their names, or in another order."""
        super().on_fit_start()
        names = getattr(getattr(self.trainer, "datamodule", None), "class_names", ())
        check_classes(self.teacher, names, "teacher")

    def _student(self, name: str, net: nn.Module, objective: Objective) -> Student:
        with naming(f"variants.{name}"):
            wrap = partial(objective.wrap, net, self.teacher, self._example)
            return Student(prepared(keyed.with_seed(self.seed, wrap)), objective)

    def _check_parameters(self) -> None:
        """Raise BadInput if a student shares a parameter with the teacher or another student."""
        owners = dict.fromkeys(self.teacher.parameters(), "the teacher")
        for name, student in self.students.items():
            for path, parameter in student.named_parameters():
                if parameter in owners:
                    expected = (
                        f"a net of its own; its {path.partition('.')[2]} is also a parameter of {owners[parameter]}"
                    )
                    raise BadInput(f"variants.{name}", type(student.net).__name__, expected)
            owners |= dict.fromkeys(student.parameters(), f"student {name}")

    @torch.no_grad()
    def _build(self, example: Tensor) -> None:
        for name, student in self.students.items():
            objective, flag = student.objective, f"variants.{name}"
            with naming(flag):
                objective.choose(student.net, self.teacher)
            for option, path in objective.student_layers.items():
                layer(student.net, path, f"{flag}.{option}", objective.needs)
            for option, path in objective.teacher_layers.items():
                layer(self.teacher, path, f"{flag}.{option}")
            if unknown := [peer for peer in objective.peers if peer == name or peer not in self.students]:
                others = ", ".join(other for other in self.students if other != name)
                raise BadInput(f"{flag}.peers", unknown[0], f"students trained beside it: {others or 'there are none'}")
        teacher = None
        if self.uses_teacher:
            teacher = run(self.teacher, example, self._teacher_layers)
        for name, student in self.students.items():
            beside = {peer: self.students[peer].eval() for peer in student.objective.peers}
            peers = {peer: other.raw(example) for peer, other in beside.items()}
            known = teacher and in_type_of(teacher, student.net)
            student.build(example, known, self.seed, f"variants.{name}", self._samples, self._labelled, peers)
            self.of_labels |= {f"{name}/{what}" for what in (*student.of_labels, ACCURACY)}

    @property
    def _objectives(self) -> dict[str, Objective]:
        return {name: student.objective for name, student in self.students.items()}

    @property
    def _teacher_layers(self) -> set[str]:
        own = {MEMBERS} if isinstance(self.teacher, Ensemble) else set()
        return own | {path for objective in self._objectives.values() for path in objective.teacher_layers.values()}

    @property
    def relates_rows(self) -> bool:
        """Whether any student's objective relates rows of the global batch; strategies that can't do so refuse it."""
        return any(o.relates_rows for name, o in self._objectives.items() if name not in self.failed)

    @property
    def fewest_rows(self) -> int:
        """Rows of a shard under `--exact`: of images as many as BatchNorm needs, which company may have."""
        return FEWEST_ROWS if self._example.is_floating_point() else 1

    @property
    def uses_teacher(self) -> bool:
        """Whether any student's objective uses the teacher."""
        return any(student.objective.uses_teacher for student in self.students.values())

    def sharded_modules(self) -> list[nn.Module]:
        """Modules that are called separately, for strategies that shard: teacher, students' nets, objectives' parts."""
        return [self.teacher, *(part for s in self.students.values() for part in (s.net, *s.objective.parts()))]

    def read_layers(self) -> list[tuple[nn.Module, bool]]:
        """The layers whose outputs, or inputs where that is true, objectives read, for strategies that cut layers."""
        nets = [(self.teacher, self._teacher_layers)]
        nets += [(s.net, {*s.objective.student_layers.values()}) for s in self.students.values()]
        return [(layer(net, name), name in of_inputs(net, names)) for net, names in nets for name in names]

    def _ask_teacher(self, inputs: Tensor) -> Outputs:
        with torch.no_grad():
            return condensed(run(self.teacher, inputs, self._teacher_layers), self._objectives)

    def train(self, mode: bool = True) -> "Distillation":
        """Set the students' mode; the teacher and failed students stay in eval mode."""
        super().train(mode)
        self.teacher.eval()
        for norm in self._batch_norms.values():
            norm.train(mode)  # with the global batch's statistics; chunks of an evaluation stand for themselves
        for name in self.failed:
            self.students[name].eval()
        return self

    def _fail(self, run: str, term: str) -> None:
        super()._fail(run, term)
        self.students[run].eval()  # a pipeline still computes it, but must not change its statistics
        for name, objective in self._objectives.items():
            if name not in self.failed and run in objective.peers:
                self._fail(name, f"peer {run}")

    def net_of(self, run: str) -> nn.Module:
        """A student's net."""
        return self.students[run].net

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
        needed = self.uses_teacher and self.training and self.cache is None
        return needed or self._comparing, self.runs

    def pipeline_stages(self) -> list[nn.Module]:
        """Teacher and students side by side, each cut into as many pieces as the deepest of them has."""
        return side_by_side(self.teacher, self.students, self.active, self._example)

    def on_train_start(self) -> None:
        """Cache the teacher's outputs if they will be needed again."""
        trainer = self.trainer
        self._epoch = trainer.num_training_batches
        self._whole = trainer.estimated_stepping_batches * trainer.accumulate_grad_batches
        data: Any = getattr(trainer, "datamodule", None)
        repeats = getattr(data, "train_inputs_repeat", False)
        if not (repeats and self.uses_teacher and self.teacher_cache_bytes and self._whole > self._epoch):
            return
        if self._batch_norms:
            name = next(iter(self._batch_norms)) or type(self.teacher).__name__
            self.print(f"teacher's outputs are not stored: they depend on the batch, by its statistics in {name}")
            return

        def chunks() -> Iterator[Batch]:
            own = data.train_in_order(replicas.rank(), replicas.count())
            return (data.on_after_batch_transfer(chunk, 0) for chunk in own)

        wanted = data.sizes["train"], lambda x: self(x)[0], self.teacher_cache_bytes
        self._storing = True
        with trainer.precision_plugin.forward_context(), torch.no_grad():
            if self._kept and replicas.count() == trainer.world_size:
                self.cache = self._kept.outputs(chunks, *wanted)
            else:
                self.cache = outputs_by_index(chunks(), *wanted)
        self._storing = False
        if self.cache is None:
            self.print(
                f"teacher's outputs are not stored: they take more than {self.teacher_cache_bytes / 2**20:g} MiB"
            )
            return
        self.asked, self.stored = max(self.asked, data.sizes["train"]), True
        if told := sizes(self.cache, self._objectives):
            self.print(f"teacher's outputs stored: {told}")

    def on_train_end(self) -> None:
        """Free the cache."""
        self.cache = None

    def on_global_batch(self, means: Mapping[str, float], count: int) -> list[nn.Parameter]:
        """Also count what the teacher computes, and check the size of the first batch."""
        if not self.batches_done:
            self.check_batch(count)
        self.asked += count if self.uses_teacher and self.cache is None else 0
        return super().on_global_batch(means, count)

    def check_batch(self, count: int) -> None:
        """Raise BadInput if an objective relates rows and its terms have no gradient in global batches of `count`."""
        for objective in self._objectives.values():
            if count < objective.fewest_related:
                why = f"{type(objective).__name__} relates samples, and relations of fewer have no gradient"
                raise BadInput("data.batch_size", count, f"at least {objective.fewest_related}: {why}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Also save that count."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["learner"] |= {"asked": self.asked, "stored": self.stored}

    def losses(
        self, outputs: tuple[Outputs | None, dict[str, Outputs]], batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the students' losses, and every term of each."""
        parts = self.task.counts(batch)
        if self._labelled and LABELLED in parts:
            raise BadInput("labelled", True, "labelled=False, as the data hides labels")
        teacher = tree_map(lambda x: x[batch.index], self.cache) if self.cache else outputs[0]
        loss = self._zero_of_failed()
        if outputs[1]:
            self.check_labels(next(iter(outputs[1].values())).logits, batch)
        for name, student in self.students.items():
            if name in self.failed:
                continue
            found = outputs[1][name]
            total, values = self._terms(student.objective, name, teacher, outputs[1], batch)
            loss = loss + self.loss_scales.scaled(name, batch.mean(total))
            measured = self.scores_of(name).per_label(found.logits, batch.labels, values.get(CE))
            measured = {key: of_labelled(x, batch.labels, batch.label_weight) for key, x in measured.items()}
            parts |= {f"{name}/{what}": x for what, x in ({**values, "loss": total, **measured}).items() if what != CE}
        return loss, parts

    def _terms(
        self, objective: Objective, name: str, teacher: Outputs | None, students: Mapping[str, Outputs], batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The losses (b,) of a student, the values (b,) of its terms, and as `CE` its cross-entropies, one a label."""
        known = None
        if teacher is not None and objective.uses_teacher:
            mine = in_type_of(viewed(name, teacher), self.students[name].net)
            known = wide(objective.adapt_teacher(mine))
        peers = {peer: tree_map(Tensor.detach, wide(students[peer])) for peer in objective.peers}
        done = self.batches_done
        place = Place(done, done / self._epoch, done / self._whole, batch.index, batch.rows, batch.count, self._samples)

        def relation(whole: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
            student, teacher, labels, peers = whole["student"], whole.get("teacher"), whole["labels"], whole["peers"]
            counts = None
            if labels.dim() > 1 and batch.label_weight is not None:
                counts = counted(labels)
                student, teacher = masked(student, counts), teacher and masked(teacher, counts)
                peers = {name: masked(outputs, counts) for name, outputs in peers.items()}
            rows = torch.arange(len(labels), device=labels.device) if objective.relates_rows else batch.rows
            count = len(labels) if objective.relates_rows else batch.count
            of_batch = {"index": whole["index"], "rows": rows, "count": count, "peers": peers, "counted": counts}
            objective.place = place._replace(**of_batch)
            visible = shown(labels, batch.label_weight)
            terms = objective.terms(student, teacher, visible)
            if "mixed" in whole:
                second = objective.terms(student, teacher, whole["mixed"].labels)
                means = {name: whole["mixed"].mean(term.values, second[name].values) for name, term in terms.items()}
                terms = {name: term._replace(values=means[name]) for name, term in terms.items()}
            total, values = weighted_sum(terms, labels, batch.label_weight)
            if objective.relates_rows:
                with torch.no_grad():
                    objective.after_batch(student, teacher, visible)
            ce = [term.values for term in terms.values() if term.is_ce]
            return total, values | ({CE: ce[0]} if ce else {})

        tree: dict[str, Any] = {"student": wide(students[name]), "labels": batch.labels, "index": batch.index}
        tree |= {"peers": peers} | ({} if known is None else {"teacher": known})
        tree |= {"mixed": batch.mixed} if isinstance(batch.mixed, Mixed) else {}
        return related(relation, tree, batch.rows, batch.count) if objective.relates_rows else relation(tree)

    def predict(self, inputs: Tensor) -> dict[str, Tensor]:
        """The logits of all students that have not failed."""
        return self._logits(self(inputs)[1])

    def beside_teacher(self, inputs: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The teacher's logits, and those of `predict`."""
        if not self.has_teacher:
            return super().beside_teacher(inputs)
        self._comparing = True
        try:
            teacher, students = self(inputs)
        finally:
            self._comparing = False
        return teacher.logits, self._logits(students)

    def _logits(self, students: Mapping[str, Outputs]) -> dict[str, Tensor]:
        return {name: outputs.logits for name, outputs in students.items() if name not in self.failed}

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
        with torch.no_grad():
            peers = {peer: self.students[peer](batch.inputs) for peer in student.objective.peers}

        def step() -> Tensor:
            student.zero_grad()
            outputs = {run: student(batch.inputs), **peers}
            return batch.mean(self._terms(student.objective, run, teacher, outputs, batch)[0])

        return step


def _trained(teacher: nn.Module | Spec, weights: str | Path | None) -> nn.Module:
    """The teacher, with weights of a file if one is given; BadInput for one that would have none."""
    net: nn.Module = giving_logits(made(teacher, "teacher"))
    if weights is not None:
        for line in load_weights(net, str(weights), "teacher_weights"):
            warnings.warn(f"{weights}: {line}", stacklevel=3)
    elif net is not teacher and not getattr(net, "is_trained", False):
        expected = "a trained net, or beside it teacher_weights=FILE: a checkpoint has no weights of the teacher"
        raise BadInput("teacher", type(net).__name__, expected)
    return net


def _remove_teacher(_module: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
    for key in [k for k in state if k.startswith(f"{prefix}teacher.")]:
        del state[key]


def _allow_missing_teacher(_module: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [k for k in keys.missing_keys if not k.startswith("teacher.")]
