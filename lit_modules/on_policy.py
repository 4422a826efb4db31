"""Students that learn from texts which they write themselves (GKD, Agarwal et al. 2024, arXiv:2306.13649)."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from apprentice import keyed, replicas
from apprentice.batch import Batch, label_mask
from apprentice.errors import BadInput
from lit_modules.averages import AveragingLearner
from lit_modules.generations import Generations, Settings, prompt_lengths
from lit_modules.nets import Outputs
from lit_modules.nets.generation import Generated, Sampling, check_writer, generate, row_keys
from lit_modules.objectives import Objective
from lit_modules.student import Student
from lit_modules.written_ahead import Window, Written, take, write_ahead
from lit_modules.written_texts import cut_rows, cut_texts, join_texts, weigh_texts

if TYPE_CHECKING:
    from torch import nn

Texts = dict[str, Batch]  # by student


class OnPolicyLearner(AveragingLearner):
    """A Learner whose students may continue the prompts of a batch and learn from what they have written.

    Whether a student does so in a step is drawn from the seed and the step with the objective's `on_policy` as its
    probability, the same number for all students, as the paper draws for a whole batch. A token is drawn from (seed,
    step, sample, position), so that texts depend neither on the ranks nor on the company; no gradient flows through
    them. A step is one of the optimizer. A row's prompt ends before its first label that counts.

    Of an objective whose `teacher_writes` the teacher has continued all prompts before, once.
    """

    students: Mapping[str, Student]
    teacher: "nn.Module"
    end_tokens: Sequence[int] = ()  # that end a response
    generations_dir: str | Path | None = None  # where the teacher's responses are kept for other runs
    _epoch: float = math.inf  # batches of an epoch
    saved = (*AveragingLearner.saved, "written_ahead")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._texts: dict[int, Texts] = {}  # of the rows of a batch, by the first of them
        self._tokens: dict[str, int] = {}  # of the global batch, by student; by "" the data's
        self._rows = 0  # in the global batch
        self._counts: list[Tensor] = []
        self._generations: dict[Settings, Generations] = {}  # of the teacher
        self.written_ahead: dict[str, Written] = {}  # by students that write for several steps at once
        self._weights: list[dict[str, int]] = []  # `_tokens` of each batch since the last step of the optimizer

    @property
    def may_write_ahead(self) -> bool:
        """Whether ranks write for one another; strategies whose ranks have other weights refuse it."""
        return any(self.students[name].objective.every > 1 for name in self.active_runs)

    @property
    def may_write(self) -> bool:
        """Whether any student learns from its own texts; strategies without whole nets on a rank refuse it."""
        return any(self.students[name].objective.on_policy for name in self.active_runs)

    def writers(self) -> list[str]:
        """The students that learn from their own texts in this step."""
        if not (self.training and self.may_write):
            return []
        return [name for name in self.active_runs if self._writes(name, *self._step_keys())]

    def _writes(self, name: str, epoch: int, step: int) -> bool:
        draw = (keyed.fold_in(self.seed, epoch, step) + 0.5) / 2**32
        return draw < self.students[name].objective.on_policy

    def _step_keys(self) -> tuple[int, int]:
        """Keys of the optimizer's step: the epoch, and the step in it."""
        epoch, batch = self._batch_in_epoch()
        return epoch, batch // self._step_batches

    def _batch_in_epoch(self) -> tuple[int, int]:
        done, epoch = self.batches_done, self._epoch
        return (0, done) if math.isinf(epoch) else divmod(done, int(epoch))

    @property
    def _step_batches(self) -> int:
        return 1 if self.attached_trainer is None else self.attached_trainer.accumulate_grad_batches

    def passes(self) -> int:
        """How often the teacher computes as many texts as the batch has rows: for the data, and for each writer."""
        by_data = self.active()[0]
        return by_data + sum(self.students[name].objective.uses_teacher for name in self.writers())

    def check_writers(self, input_dtype: torch.dtype, end_tokens: Sequence[int]) -> None:
        """Keep the tokens that end a response; raise BadInput for a student that can't write texts."""
        self.end_tokens = tuple(end_tokens)
        for name, student in self.students.items():
            objective = student.objective
            if share := objective.on_policy:
                if input_dtype.is_floating_point and objective.teacher_writes:
                    raise BadInput(
                        f"variants.{name}", type(objective).__name__, "another method for inputs that are no texts"
                    )
                if input_dtype.is_floating_point:
                    raise BadInput(f"variants.{name}.on_policy", share, "0 for inputs that are no texts")
                if objective.teacher_writes:
                    check_writer(self.teacher, "teacher")
                    self._generations_of(objective)
                else:
                    check_writer(student.net, f"variants.{name}")
            if writers := [peer for peer in student.objective.peers if self.students[peer].objective.on_policy]:
                raise BadInput(f"variants.{name}.peers", writers[0], "students with on_policy 0, which see the data")

    def check_data(self, data: object) -> None:
        """Raise BadInput if responses are to be written before their batch comes, and a data module has other texts."""
        if not getattr(data, "train_texts_repeat", False):
            for name, student in self.students.items():
                objective = student.objective
                if objective.every > 1:
                    expected = "1, or texts that are the same in each epoch, whose prompts are known before"
                    raise BadInput(f"variants.{name}.every", objective.every, expected)
                if objective.teacher_writes:
                    expected = "a data module whose texts are the same in each epoch, to which the teacher writes once"
                    raise BadInput("data", getattr(data, "name", type(data).__name__), expected)

    # ---- a batch's texts: first each part of it, then their numbers, then the losses

    def write(self, batch: Any, counted: bool = True) -> None:
        """Let students write for some rows of a global batch; `counted` unless another rank does the same."""
        if not (names := self.writers()):
            return
        batch = self._part(batch)
        if batch.starts is not None:
            self.check_packed()
        prompts = prompt_lengths(batch.labels)
        written = {name: self._texts_of(name, batch, prompts) for name in names}
        in_rows = label_mask(batch.labels).sum(1), *(texts.lengths for texts in written.values())
        if isinstance(batch.label_weight, Tensor):  # texts count alike
            in_rows = tuple(x > 0 for x in in_rows)
        counts = [len(prompts), *(x.sum() for x in in_rows)]
        self._counts.append(torch.stack([torch.as_tensor(x, device=prompts.device) for x in counts]) * counted)
        self._texts[_first(batch)] = {
            name: join_texts(batch, prompts, texts) for name, texts in written.items()
        }  # fmt: skip

    def on_train_batch_start(self, *args: Any) -> int | None:
        """Let students write for the prompts of the next steps, if they do so in advance."""
        for name in self.writers():
            if self.students[name].objective.every > 1:
                self._write_ahead(name)
        return super().on_train_batch_start(*args)

    def _write_ahead(self, name: str) -> None:
        """Write for the rest of a window of steps, unless that is done."""
        (epoch, step), objective, batches = self._step_keys(), self.students[name].objective, self._step_batches
        first, last = step - step % objective.every, math.ceil(self._epoch / batches)
        window = Window(epoch, range(first, min(first + objective.every, last)), batches, int(self._epoch))
        if name in self.written_ahead and self.written_ahead[name]["window"] == window.key:
            return

        def write(rows: Batch, of_step: Tensor) -> Generated:
            keyed_by = zip(rows.index.split(1), of_step.tolist(), strict=True)
            keys = torch.cat([row_keys(sample, self.seed, epoch, s) for sample, s in keyed_by])
            return self._generate(name, rows, prompt_lengths(rows.labels), keys)

        steps = [s for s in window.steps if s >= step and self._writes(name, epoch, s)]
        with self.trainer.precision_plugin.forward_context():
            self.written_ahead[name] = write_ahead(window, steps, self.trainer, write, objective.max_new_tokens)

    def _texts_of(self, name: str, batch: Batch, prompts: Tensor) -> Generated:
        if self.students[name].objective.every > 1 and self.attached_trainer is not None:
            return take(self.written_ahead[name], self._batch_in_epoch()[1], batch.rows)
        return self._continue(name, batch, prompts)

    def _continue(self, name: str, batch: Batch, prompts: Tensor) -> Generated:
        student = self.students[name]
        if student.objective.teacher_writes:
            texts = self._generations_of(student.objective).take(batch)
            return cut_texts(texts, prompts, getattr(student.net, "block_size", None))
        samples = batch.index if batch.draws is None else batch.draws
        return self._generate(name, batch, prompts, row_keys(samples, self.seed, *self._step_keys()))

    def _generate(self, name: str, batch: Batch, prompts: Tensor, keys: Tensor) -> Generated:
        student = self.students[name]
        objective = student.objective
        with torch.autocast(batch.inputs.device.type, enabled=torch.is_autocast_enabled(batch.inputs.device.type)):
            texts = generate(
                student.net, batch.inputs, prompts, objective.max_new_tokens, keys,
                Sampling(objective.sampling_temperature), self.end_tokens,
            )  # fmt: skip
        longest = getattr(self.teacher, "block_size", None)
        return cut_texts(texts, prompts, longest if objective.uses_teacher else None)

    def _generations_of(self, objective: Objective) -> Generations:
        """What the teacher writes for students of an objective's options."""
        seed = self.seed if objective.sampling_temperature else 0
        settings = Settings(objective.max_new_tokens, objective.sampling_temperature, seed, tuple(self.end_tokens))
        if settings not in self._generations:
            self._generations[settings] = Generations(self.teacher, settings, self.generations_dir, self.print)
        return self._generations[settings]

    def on_train_start(self) -> None:
        """Let the teacher write the responses that students learn from, or read them."""
        super().on_train_start()
        self.check_data(getattr(self.trainer, "datamodule", None))
        objectives = [self.students[name].objective for name in self.active_runs]
        written = {id(x): x for o in objectives if o.teacher_writes for x in [self._generations_of(o)]}
        with self.trainer.precision_plugin.forward_context():
            for generations in written.values():
                generations.fill(getattr(self.trainer, "datamodule", None), self.trainer)

    def count_written(self) -> None:
        """Sum the tokens of all parts of the global batch by one message; collective."""
        if not (names := self.writers()):
            return
        zeros = torch.zeros(2 + len(names), dtype=torch.int64, device=self.device)
        self._rows, data, *written = replicas.all_reduce_sum(sum(self._counts, start=zeros)).tolist()
        self._tokens = {"": data, **dict(zip(names, written, strict=True))}
        self._counts.clear()

    def take_texts(self, batch: Batch) -> Texts:
        """The texts that students have written for these rows, with the denominator of the global batch."""
        if not self.writers():
            return {}
        if not replicas.is_shard():
            self.write(batch)
            self.count_written()
        texts = self._texts.get(_first(batch), {})
        return {name: weigh_texts(x, self._rows / max(self._tokens[name], 1)) for name, x in texts.items()}

    def shard_step(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        batch = self._part(batch)
        texts = self.take_texts(batch)
        loss, parts = super().shard_step(batch)
        taught = self._score(texts)
        for name, text in texts.items():
            with keyed.noise(self.seed, text.step, text.rows):
                outputs = self.students[name](text.inputs)
            part, values = self.losses((taught.get(name), {name: outputs}), text)
            loss = loss + part * self._share(name)
            parts |= {what: x for what, x in values.items() if what.startswith(f"{name}/")}
        return loss, parts

    def parts_alone(self, run: str, batch: Batch) -> list[Batch]:
        """What a student learns from in a step whose cost is measured: it continues `on_policy` of the rows."""
        count = round(self.students[run].objective.on_policy * len(batch.inputs))
        if not count:
            return [batch]
        rows = batch.part(0, count)
        prompts = prompt_lengths(rows.labels)
        written = self._continue(run, rows, prompts)
        texts = join_texts(rows, prompts, written)
        rest = batch.part(count, len(batch.inputs))
        return [weigh_texts(texts, count / max(int(written.lengths.sum()), 1)), *([rest] if len(rest.inputs) else [])]

    def _score(self, texts: Texts) -> dict[str, Outputs]:
        """The teacher's outputs for texts of students, by one pass; shard by shard, by one for each.

        Under `--exact` the bits of a student must not depend on its company.
        """
        texts = {name: x for name, x in texts.items() if self.students[name].objective.uses_teacher}
        if replicas.is_shard() or len(texts) < 2:
            return {name: self._ask_teacher(x.inputs) for name, x in texts.items()}
        width = max(x.inputs.shape[1] for x in texts.values())
        outputs = self._ask_teacher(
            torch.cat([F.pad(x.inputs, (0, width - x.inputs.shape[1])) for x in texts.values()])
        )
        parts, first = {}, 0
        for name, x in texts.items():
            rows, columns = slice(first, first := first + len(x.inputs)), x.inputs.shape[1]
            parts[name] = outputs.map(partial(cut_rows, rows=rows, width=width, columns=columns))
        return parts

    def _ask_teacher(self, inputs: Tensor) -> Outputs:
        raise NotImplementedError

    def check_packed(self) -> None:
        """Raise BadInput for students that can't learn from rows of several texts."""
        raise NotImplementedError

    def active(self) -> tuple[bool, Sequence[str]]:
        """Whether the teacher runs in a forward of the data's inputs, and which students."""
        raise NotImplementedError

    # ---- accumulated batches

    def _share(self, name: str) -> float:
        """The weight of a student's loss in an accumulated batch, whose gradient is weighted by the data's tokens."""
        trainer = self.attached_trainer
        if trainer is None or trainer.accumulate_grad_batches == 1:
            return 1.0
        return self._tokens[name] / max(self._tokens[""], 1)

    def on_global_batch(self, means: Mapping[str, float], count: int) -> "list[nn.Parameter]":
        self._weights.append(dict(self._tokens) if self.writers() else {})
        self._texts.clear()
        return super().on_global_batch(means, count)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Divide the accumulated gradients of students that have written by their tokens, in place of the data's."""
        batches, self._weights = self._weights, []
        if self.trainer.accumulate_grad_batches > 1:
            for name in dict.fromkeys(name for tokens in batches for name in tokens if name):
                pairs = [(tokens[""], tokens.get(name, tokens[""])) for tokens in batches if tokens]
                data, written = (sum(numbers) for numbers in zip(*pairs, strict=True))
                for p in self._parameters_of([name]):
                    if p.grad is not None and written:
                        p.grad.mul_(data / written)
        super().on_before_optimizer_step(optimizer)


def _first(batch: Batch) -> int:
    return int(batch.rows[0]) if len(batch.rows) else -1
