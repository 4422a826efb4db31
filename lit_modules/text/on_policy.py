"""Students that learn from texts which they write themselves (GKD, Agarwal et al. 2024, arXiv:2306.13649)."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice import keyed, replicas
from apprentice.batch import IGNORED, Batch, label_mask
from apprentice.contract import ModuleLayout
from apprentice.errors import BadInput
from lit_modules.nets.generation import Generated, Sampling, check_writer, generate, longest_text, row_keys
from lit_modules.nets.outputs import Outputs
from lit_modules.objectives.text_objective import TextObjective, of_texts
from lit_modules.tasks.base import BatchSize
from lit_modules.text.generations import Generations, Settings, prompt_lengths
from lit_modules.text.packed_texts import check_packed
from lit_modules.text.response_windows import (
    Window,
    WindowResponses,
    batch_in_epoch,
    batches_of_step,
    responses_of_rows,
    step_keys,
    write_ahead,
)
from lit_modules.text.text_batches import (
    SIZES,
    build_batch,
    cut_before,
    cut_outputs,
    cut_texts,
    normalize_by_tokens,
    text_sizes,
)
from lit_modules.training.extras import Extra, MoreLosses
from lit_modules.training.student import Student

if TYPE_CHECKING:
    from lit_modules.distillation import Distillation

BatchesByStudent = dict[str, Batch]


@dataclass(frozen=True)
class _Preparation:
    """Lets students write before a step, as strategies ask it."""

    texts: "OnPolicyTexts"
    loop: "Distillation"

    def prepare_rows(self, batch: Any, counted: bool) -> None:
        self.texts.write(self.loop, batch, counted)

    def count_prepared(self) -> None:
        self.texts.count_written(self.loop)


class OnPolicyTexts(Extra["Distillation"]):
    """Lets students of a distillation continue the prompts of a batch and learn from what they have written.

    Whether a student does so in a step is drawn from the seed and the step with the objective's `on_policy` as its
    probability, the same number for all students, as the paper draws for a whole batch. A token is drawn from (seed,
    step, sample, position), so that texts depend neither on the ranks nor on the company; no gradient flows through
    them. A step is one of the optimizer. A row's prompt ends before its first label that counts.

    Of an objective whose `teacher_writes` the teacher has continued all prompts before, once.

    Attributes:
        learned_texts: by run, the sizes of texts that it has learned from in place of the data's: see `text_sizes`.

    Args:
        students: by name.
        teacher: the whole net.
        folder: where the teacher's responses are kept for other runs.
        end_tokens: that end a response.
        seed: of the draws.
        tell: prints a line, on one rank.
    """

    saved = ("written_ahead", "learned_texts")

    def __init__(
        self, students: Mapping[str, Student], teacher: nn.Module, folder: str | Path | None,
        end_tokens: Sequence[int], seed: int, tell: Callable[[str], object],
    ) -> None:  # fmt: skip
        self.students, self.teacher, self.folder = dict(students), teacher, folder
        self.objectives = {name: of_texts(student.objective) for name, student in students.items()}
        self.end_tokens, self.seed, self.tell = tuple(end_tokens), seed, tell
        self.learned_texts = dict[str, Sequence[int]]()
        self.written_ahead: dict[str, WindowResponses] = {}  # by students that write for several steps at once
        self.tokens: dict[str, int] = {}  # of the global batch, by student; by "" the data's
        self._texts: dict[int, BatchesByStudent] = {}  # of the rows of a batch, by the first of them
        self._sizes: dict[str, Sequence[int]] = {}  # of the texts of the global batch, by student: see `text_sizes`
        self._rows = 0  # in the global batch
        self._counts: list[Tensor] = []
        self._generations: dict[Settings, Generations] = {}  # of the teacher
        self._weights: list[dict[str, int]] = []  # `tokens` of each batch since the last step of the optimizer
        self._check_writers()

    def _check_writers(self) -> None:
        """Raise BadInput for a student that can't write texts."""
        for name, student in self.students.items():
            objective = self.objectives[name]
            if objective.teacher_writes:
                check_writer(self.teacher, "teacher")
                self._generations_of(objective)
            elif objective.on_policy:
                check_writer(student.net, f"variants.{name}")
            if writers := [peer for peer in student.objective.peers if self.objectives[peer].on_policy]:
                raise BadInput(f"variants.{name}.peers", writers[0], "students with on_policy 0, which see the data")

    def check_data(self, loop: "Distillation", data: Any) -> None:
        """Raise BadInput if responses are to be written before their batch comes, and a data module has other texts."""
        if not getattr(data, "train_texts_repeat", False):
            for name, objective in self.objectives.items():
                if objective.every > 1:
                    expected = "1, or texts that are the same in each epoch, whose prompts are known before"
                    raise BadInput(f"variants.{name}.every", objective.every, expected)
                if objective.teacher_writes:
                    expected = "a data module whose texts are the same in each epoch, to which the teacher writes once"
                    raise BadInput("data", getattr(data, "name", type(data).__name__), expected)

    def add_to_layout(self, loop: "Distillation", layout: ModuleLayout) -> ModuleLayout:
        if not self.may_write(loop):
            return layout
        writes_ahead = any(self.objectives[name].every > 1 for name in loop.active_runs)
        return replace(
            layout, preparation=_Preparation(self, loop), whole_nets_unless="methods with on_policy 0",
            equal_weights_unless="methods with every 1" if writes_ahead else "",  # as ranks write for one another
        )  # fmt: skip

    # ---- who writes in which step

    def may_write(self, loop: "Distillation") -> bool:
        """Return whether any student learns from its own texts."""
        return any(self.objectives[name].on_policy for name in loop.active_runs)

    def runs_elsewhere(self, loop: "Distillation") -> list[str]:
        """Return the students that learn from their own texts in this step."""
        if not (loop.training and self.may_write(loop)):
            return []
        return [name for name in loop.active_runs if self._writes(name, *step_keys(loop))]

    def _writes(self, name: str, epoch: int, step: int) -> bool:
        draw = (keyed.fold_in(self.seed, epoch, step) + 0.5) / 2**32
        return draw < self.objectives[name].on_policy

    def learns_from_data(self, run: str, epoch: int, step: int) -> bool:
        """Return whether a run learns from the data in a step of the optimizer."""
        return not self._writes(run, epoch, step)

    def sizes_elsewhere(self, loop: "Distillation") -> Mapping[str, int]:
        return {name: self.tokens[name] for name in self.runs_elsewhere(loop)}

    # ---- a batch's texts: first each part of it, then their numbers, then the losses

    def write(self, loop: "Distillation", batch: Any, counted: bool = True) -> None:
        """Let students write for some rows of a global batch; `counted` unless another rank does the same."""
        if not (names := self.runs_elsewhere(loop)):
            return
        batch = loop.rows_of(batch)
        if batch.starts is not None:
            for name, student in self.students.items():
                check_packed(name, student)
        prompts = prompt_lengths(batch.labels)
        written = {name: self._texts_of(loop, name, batch, prompts) for name in names}
        in_rows = label_mask(batch.labels).sum(1), *(texts.lengths for texts in written.values())
        if isinstance(batch.label_weight, Tensor):  # texts count alike
            in_rows = tuple(x > 0 for x in in_rows)
        joined = {name: build_batch(batch, prompts, texts) for name, texts in written.items()}
        counts = torch.stack([torch.tensor(len(prompts), device=prompts.device), *(x.sum() for x in in_rows)])
        self._counts.append(torch.cat([counts, *map(text_sizes, joined.values())]) * counted)
        self._texts[_first(batch)] = joined

    def count_written(self, loop: "Distillation") -> None:
        """Sum the tokens of all parts of the global batch by one message; collective."""
        if not (names := self.runs_elsewhere(loop)):
            return
        zeros = torch.zeros(2 + (1 + SIZES) * len(names), dtype=torch.int64, device=loop.device)
        self._rows, data, *rest = replicas.all_reduce_sum(sum(self._counts, start=zeros)).tolist()
        written, sizes = rest[: len(names)], iter(rest[len(names) :])
        self.tokens = {"": data, **dict(zip(names, written, strict=True))}
        self._sizes = {name: [*islice(sizes, SIZES)] for name in names}
        self._counts.clear()

    def _texts_of(self, loop: "Distillation", name: str, batch: Batch, prompts: Tensor) -> Generated:
        if self.objectives[name].every > 1 and loop.attached_trainer is not None:
            return responses_of_rows(self.written_ahead[name], batch_in_epoch(loop)[1], batch.rows)
        return self.generate_batch(loop, name, batch, prompts)

    def generate_batch(self, loop: "Distillation", name: str, batch: Batch, prompts: Tensor) -> Generated:
        if (objective := self.objectives[name]).teacher_writes:
            texts = self._generations_of(objective).take(batch)
            return cut_texts(texts, prompts, longest_text(self.students[name].net))
        return self._generate(name, batch, prompts, row_keys(batch.index, self.seed, *step_keys(loop)))

    def _generate(self, name: str, batch: Batch, prompts: Tensor, keys: Tensor) -> Generated:
        student, objective = self.students[name], self.objectives[name]
        with torch.autocast(batch.inputs.device.type, enabled=torch.is_autocast_enabled(batch.inputs.device.type)):
            texts = generate(
                student.net, batch.inputs, prompts, objective.max_new_tokens, keys,
                Sampling(objective.sampling_temperature), self.end_tokens,
            )  # fmt: skip
        if not student.objective.uses_teacher:
            return texts
        if (shared := getattr(self.teacher, "shared_tokens", None)) is not None:
            texts = cut_before(texts, shared.absent)  # which the teacher can't read
        return cut_texts(texts, prompts, longest_text(self.teacher))

    def generated_batches(self, loop: "Distillation", batch: Batch) -> BatchesByStudent:
        """Return the texts that students have written for these rows, with the denominator of the global batch."""
        if not self.runs_elsewhere(loop):
            return {}
        if not replicas.is_shard():
            self.write(loop, batch)
            self.count_written(loop)
        texts = self._texts.get(_first(batch), {})
        return {name: normalize_by_tokens(x, self._rows / max(self.tokens[name], 1)) for name, x in texts.items()}

    @contextmanager
    def watch(self, loop: "Distillation", batch: Batch) -> Iterator[Callable[[], list[MoreLosses]]]:
        texts = self.generated_batches(loop, batch)

        def losses() -> list[MoreLosses]:
            taught = self._score(loop, texts)
            return [self._loss(loop, name, text, taught.get(name)) for name, text in texts.items()]

        yield losses

    def _loss(self, loop: "Distillation", name: str, text: Batch, taught: Outputs | None) -> MoreLosses:
        with keyed.noise(self.seed, text.step, text.rows):
            outputs = loop.outputs.run_student(name, self.students[name], text.inputs, (), "losses")
        part, values = loop.losses((taught, {name: outputs}), text)
        of_student = {what: x for what, x in values.items() if what.startswith(f"{name}/")}
        return MoreLosses(part * self._share(loop, name), of_student)

    def _score(self, loop: "Distillation", texts: BatchesByStudent) -> dict[str, Outputs]:
        """Return the teacher's outputs for texts of students, by one pass; shard by shard, by one for each.

        Under `exact` the bits of a student must not depend on its company.
        """
        texts = {name: x for name, x in texts.items() if self.students[name].objective.uses_teacher}
        if replicas.is_shard() or len(texts) < 2:
            return {name: self._ask(loop, x) for name, x in texts.items()}
        width = max(x.inputs.shape[1] for x in texts.values())
        wide = [(x, (0, width - x.inputs.shape[1])) for x in texts.values()]
        inputs = torch.cat([F.pad(x.inputs, sides) for x, sides in wide])
        labels = torch.cat([F.pad(x.labels, sides, value=IGNORED) for x, sides in wide])
        joined = next(iter(texts.values()))._replace(inputs=inputs, labels=labels)
        outputs = self._ask(loop, joined)
        parts, first = {}, 0
        for name, x in texts.items():
            rows, columns = slice(first, first := first + len(x.inputs)), x.inputs.shape[1]
            parts[name] = cut_outputs(outputs, rows, width, columns)
        return parts

    def _ask(self, loop: "Distillation", texts: Batch) -> Outputs:
        return loop.ask_teacher(texts.inputs, "losses", loop.outputs.beside(texts))

    def on_global_batch(self, loop: "Distillation", size: BatchSize) -> None:
        names = self.runs_elsewhere(loop)
        self._weights.append(dict(self.tokens) if names else {})
        for name in names:
            before = self.learned_texts.get(name, [0] * SIZES)
            self.learned_texts[name] = [a + b for a, b in zip(before, self._sizes[name], strict=True)]
        self._texts.clear()

    # ---- texts that are written before their batch comes

    def on_train_start(self, loop: "Distillation") -> None:
        """Let the teacher write the responses that students learn from, or read them."""
        data = getattr(loop.trainer, "datamodule", None)
        self.check_data(loop, data)
        objectives = [self.objectives[name] for name in loop.active_runs]
        written = {id(x): x for o in objectives if o.teacher_writes for x in [self._generations_of(o)]}
        with loop.trainer.precision_plugin.forward_context():
            for generations in written.values():
                generations.fill(data, loop.trainer)

    def on_train_end(self, loop: "Distillation") -> None:
        self.written_ahead.clear()

    def on_batch_start(self, loop: "Distillation") -> None:
        """Let students write for the prompts of the next steps, if they do so in advance."""
        for name in self.runs_elsewhere(loop):
            if self.objectives[name].every > 1:
                self._write_ahead(loop, name)

    def _write_ahead(self, loop: "Distillation", name: str) -> None:
        """Write for the rest of a window of steps, unless that is done."""
        (epoch, step), objective, batches = step_keys(loop), self.objectives[name], batches_of_step(loop)
        first, last = step - step % objective.every, math.ceil(loop.epoch_batches / batches)
        window = Window(epoch, range(first, min(first + objective.every, last)), batches, int(loop.epoch_batches))
        if name in self.written_ahead and self.written_ahead[name]["window"] == window.key:
            return

        def write(rows: Batch, of_step: Tensor) -> Generated:
            keyed_by = zip(rows.index.split(1), of_step.tolist(), strict=True)
            keys = torch.cat([row_keys(sample, self.seed, epoch, s) for sample, s in keyed_by])
            return self._generate(name, rows, prompt_lengths(rows.labels), keys)

        steps = [s for s in window.steps if s >= step and self._writes(name, epoch, s)]
        with loop.trainer.precision_plugin.forward_context():
            self.written_ahead[name] = write_ahead(window, steps, loop.trainer, write, objective.max_new_tokens)

    def _generations_of(self, objective: TextObjective | type[TextObjective]) -> Generations:
        """Return what the teacher writes for students of an objective's options."""
        seed = self.seed if objective.sampling_temperature else 0
        settings = Settings(objective.max_new_tokens, objective.sampling_temperature, seed, self.end_tokens)
        if settings not in self._generations:
            self._generations[settings] = Generations(self.teacher, settings, self.folder, self.tell)
        return self._generations[settings]

    # ---- a student by itself

    def timed_batches(self, loop: "Distillation", run: str, batch: Batch) -> list[Batch]:
        """Return what a student learns from in a timed step: it continues `on_policy` of the rows, if none has yet."""
        count = round(self.objectives[run].on_policy * len(batch.inputs))
        if not count or batch.is_written:
            return [batch]
        rest = batch.part(count, len(batch.inputs))
        return [self.timed_batch(loop, run, batch.part(0, count)), *([rest] if len(rest.inputs) else [])]

    def timed_batch(self, loop: "Distillation", run: str, rows: Batch) -> Batch:
        """Return the texts that a student learns from in place of these rows, whose prompts are continued."""
        prompts = prompt_lengths(rows.labels)
        written = self.generate_batch(loop, run, rows, prompts)
        return normalize_by_tokens(build_batch(rows, prompts, written), rows.count / max(int(written.lengths.sum()), 1))

    # ---- accumulated batches

    def _share(self, loop: "Distillation", name: str) -> float:
        """Return the weight of a student's loss in an accumulated batch, which is weighted by the data's tokens."""
        if batches_of_step(loop) == 1:
            return 1.0
        return self.tokens[name] / max(self.tokens[""], 1)

    def before_step(self, loop: "Distillation") -> None:
        """Divide the accumulated gradients of students that have written by their tokens, in place of the data's."""
        batches, self._weights = self._weights, []
        if loop.trainer.accumulate_grad_batches > 1:
            for name in dict.fromkeys(name for tokens in batches for name in tokens if name):
                pairs = [(tokens[""], tokens.get(name, tokens[""])) for tokens in batches if tokens]
                data, written = (sum(numbers) for numbers in zip(*pairs, strict=True))
                for p in loop.parameters_of([name]):
                    if p.grad is not None and written:
                        p.grad.mul_(data / written)


def _first(batch: Batch) -> int:
    return int(batch.rows[0]) if len(batch.rows) else -1
