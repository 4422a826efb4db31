"""Students that learn from what they write: the loss is a formula's, on any number of ranks, alone or in company."""

import copy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apprentice.batch import IGNORED, Batch
from apprentice.errors import BadInput
from datamodules import Chat
from datamodules.text.loaders import weigh_sequences
from datamodules.text.marked_turns import END
from harness.runs.safepoints import SafePoints
from lab.strategies import LocalSGD
from lit_modules.distillation import Distillation
from lit_modules.nets.generation import Generated, Sampling, generate, row_keys
from lit_modules.objectives import DML, GKD, CrossEntropy, Hinton, Objective, Sum
from lit_modules.tasks import Tokens
from lit_modules.text import on_policy as on_policy_module
from lit_modules.text.generations import prompt_lengths
from lit_modules.text.on_policy import OnPolicyTexts, step_keys
from lit_modules.text.text_batches import build_batch
from strategies import FSDP
from tests.chats import chat, rows, write_lines
from tests.commands import kill_at, lasting, nets, results, start
from tests.grids import mostly_slow
from tests.language import PACKED, gpt, on_policy, text
from tests.training import SHAPE, assert_same, fit, net, on, outcome, weights

V, ENDS = 256, (ord(END), *range(128, 160))  # a net that knows nothing seldom ends a response by one token


def sharp(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(6 if p.dim() > 1 else 1)
    return module


def chats(folder: Path, batch_size: int = 6, **options: Any) -> Chat:
    """18 conversations that train, of prompts and responses of several lengths."""
    return chat(folder, 26, 3, **{"batch_size": batch_size, "max_length": 40} | options)


def first_batch(folder: Path) -> Batch:
    """The first batch of 6, whose second text has no response."""
    batch = next(iter(chats(folder).train_dataloader()))
    batch.labels[1] = IGNORED
    counted = int((batch.labels >= 0).sum())
    return batch._replace(label_weight=batch.labels.numel() / counted)


def module(objectives: dict[str, Objective], double: bool = True, **options: Any) -> Distillation:
    teacher = sharp(gpt(vocab_size=V, block_size=40, seed=7))
    students = {
        name: (sharp(gpt(vocab_size=V, block_size=40, num_layers=1)), objective)
        for name, objective in objectives.items()
    }
    options = {"input_shape": (16,), "num_classes": V, "task": Tokens(), "input_dtype": torch.int64} | options
    made = Distillation(teacher, students, end_tokens=ENDS, seed=3, **options)
    return made.double() if double else made


def gkd(on_policy: float = 1.0, **options: Any) -> GKD:
    return GKD(**{"beta": 0.3, "on_policy": on_policy, "max_new_tokens": 5} | options)


def loss_by_hand(student: nn.Module, teacher: nn.Module, batch: Batch, step: tuple[int, int], by_text: bool) -> Tensor:
    """The divergence of each token that a student has written, text by text, over their number; or texts' means."""
    values, beta = [], 0.3
    for row in range(len(batch.inputs)):
        counted = (batch.labels[row] >= 0).nonzero()
        if not len(counted):
            continue
        prompt = batch.inputs[row, : int(counted[0]) + 1]
        key = row_keys(batch.index[row : row + 1], 3, *step)
        written = generate(student, prompt[None], torch.tensor([len(prompt)]), 5, key, ends=ENDS, cached=False)
        text = torch.cat([prompt, written.tokens[0, : written.lengths[0]]])
        p, q = (net.eval()(text[None, :-1])[0, len(prompt) - 1 :].softmax(-1) for net in (teacher, student))
        m = beta * p + (1 - beta) * q
        values += [(beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1))]
    return torch.stack([x.mean() for x in values]).mean() if by_text else torch.cat(values).mean()


@pytest.mark.parametrize(("by_text", "chunk"), [(False, 0), (True, 0), (False, 3)])
def test_the_loss_is_the_formulas(by_text: bool, chunk: int, tmp_path: Path) -> None:
    students = module({"gkd": gkd(), "ce": CrossEntropy()}, loss_chunk=chunk)
    batch = first_batch(tmp_path)
    if by_text:
        batch = batch._replace(label_weight=weigh_sequences(batch.labels, torch.zeros_like(batch.labels), 6 / 5))
    loss, parts = students.train().shard_step(batch)
    expected = loss_by_hand(students.students["gkd"].net, students.teacher, batch, (0, 0), by_text)
    assert parts["gkd/loss"].mean().item() == pytest.approx(expected.item(), rel=1e-10)
    loss.backward()
    found = [p.grad.clone() for p in students.students["gkd"].net.parameters()]
    other = torch.autograd.grad(expected, [*students.students["gkd"].net.parameters()])
    for a, b in zip(found, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    assert all(p.grad is None for p in students.teacher.parameters())


def test_texts_join_the_prompt_with_what_was_written(tmp_path: Path) -> None:
    batch = first_batch(tmp_path)
    prompts, student = prompt_lengths(batch.labels), sharp(gpt(vocab_size=V, block_size=40))
    written = generate(student, batch.inputs, prompts, 4, row_keys(batch.index, 0), Sampling(), ENDS)
    texts = build_batch(batch, prompts, written)
    assert prompts[1] == written.lengths[1] == 0
    assert (texts.labels[1] == IGNORED).all()
    for row in (0, 2, 3, 4, 5):
        length, new = int(prompts[row]), int(written.lengths[row])
        whole = [*batch.inputs[row, :length].tolist(), *written.tokens[row, :new].tolist()]
        assert texts.inputs[row, : length + new - 1].tolist() == whole[:-1]
        assert texts.labels[row, length - 1 : length + new - 1].tolist() == whole[length:]
        assert (texts.labels[row] != IGNORED).sum() == new


def test_the_share_of_batches_is_drawn_by_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    students = module({"some": gkd(0.5), "always": gkd(1.0), "never": gkd(0.0)}).train()
    drawn: list[list[str]] = []
    for step in range(200):
        monkeypatch.setattr(on_policy_module, "step_keys", lambda loop, step=step: (0, step))
        drawn.append(on_policy(students).runs_elsewhere(students))
    assert all("always" in names and "never" not in names for names in drawn)
    assert 70 < sum("some" in names for names in drawn) < 130
    students.eval()
    assert on_policy(students).runs_elsewhere(students) == []


@pytest.mark.parametrize("place", mostly_slow(["ddp 2", "ddp 3", "ddp 1 exact 4"], "ddp 2"))
def test_any_number_of_ranks_gives_the_same_students(place: str, tmp_path: Path) -> None:
    objectives = {"gkd": gkd(0.6), "kd": Hinton(), "reverse": gkd(1.0, beta=1.0), "ahead": gkd(0.8, every=2)}
    make = lambda: module(objectives)  # noqa: E731
    (logs := tmp_path / "logs").mkdir()
    tags = ["gkd/train/loss", "reverse/train/loss"]
    one = outcome(make(), chats(tmp_path), logs, tags)
    other = outcome(make(), chats(tmp_path), logs, tags, **on(place))
    assert other[0] == pytest.approx(one[0], abs=1e-9, rel=0)
    assert_same(one[1], other[1], atol=1e-9)


@pytest.mark.slow
def test_exact_gives_the_same_bits(tmp_path: Path) -> None:
    objectives = {"gkd": gkd(0.6), "all": gkd(), "ahead": gkd(every=2)}
    make: Callable[[], Distillation] = lambda: module(objectives, double=False)  # noqa: E731
    one = fit(make(), chats(tmp_path), **on("ddp 1 exact 4"))
    two = fit(make(), chats(tmp_path), **on("ddp 2 exact 4"))
    assert_same(weights(one), weights(two))
    alone = fit(module({"gkd": gkd(0.6)}, double=False), chats(tmp_path), **on("ddp 2 exact 4"))
    company = {key: x for key, x in weights(one).items() if ".gkd." in key}
    assert_same({key: x for key, x in weights(alone).items() if ".gkd." in key}, company)


def test_accumulated_batches_are_one_batch(tmp_path: Path) -> None:
    make = lambda: module({"gkd": gkd(0.5), "kd": Hinton(), "ahead": gkd(0.5, every=2)})  # noqa: E731
    whole = fit(make(), chats(tmp_path, 9), max_epochs=3)
    parts = fit(make(), chats(tmp_path, 3), max_epochs=3, accumulate_grad_batches=3)
    assert_same(weights(whole), weights(parts), atol=1e-9)


@pytest.mark.slow
def test_a_student_alone_is_one_in_company(tmp_path: Path) -> None:
    company = fit(module({"gkd": gkd(0.7), "reverse": gkd(beta=1.0), "ce": CrossEntropy()}), chats(tmp_path))
    alone = fit(module({"gkd": gkd(0.7)}), chats(tmp_path))
    mine = {key: x for key, x in weights(company).items() if ".gkd." in key}
    assert_same({key: x for key, x in weights(alone).items() if ".gkd." in key}, mine, atol=1e-12)


class Stepwise(OnPolicyTexts):
    """Writes when a batch comes, by a copy of the student as it was at the first step of two."""

    copied: nn.Module

    def _write_ahead(self, loop: Distillation, name: str) -> None:
        (epoch, step), self.written_ahead[name] = step_keys(loop), {}
        if step % 2 == 0 or (epoch, step) == (0, 0):
            self.copied = copy.deepcopy(self.students[name].net)

    def _texts_of(self, loop: Distillation, name: str, batch: Batch, prompts: Tensor) -> Generated:
        keys = row_keys(batch.index, self.seed, *step_keys(loop))
        written = generate(self.copied, batch.inputs, prompts, 5, keys, Sampling(), ENDS)
        return written._replace(lengths=written.lengths.minimum(40 - prompts))


def test_writing_in_advance_is_writing_by_the_weights_of_the_first_step(tmp_path: Path) -> None:
    ahead = fit(module({"gkd": gkd(every=2)}), chats(tmp_path), max_epochs=2)
    stepwise = module({"gkd": gkd(every=2)})
    on_policy(stepwise).__class__ = Stepwise
    assert_same(weights(ahead), weights(fit(stepwise, chats(tmp_path), max_epochs=2)), atol=1e-12)
    other = weights(fit(module({"gkd": gkd()}), chats(tmp_path), max_epochs=2))
    assert any((x - other[key]).abs().max() > 1e-6 for key, x in weights(ahead).items())


def test_a_batch_in_which_nothing_is_written_teaches_nothing(tmp_path: Path) -> None:
    students = module({"gkd": gkd()}).train()
    batch = first_batch(tmp_path)
    batch = batch._replace(labels=batch.labels.clone().fill_(IGNORED), label_weight=1.0)
    loss, parts = students.shard_step(batch)
    loss.backward()
    assert loss == 0
    assert all(x.isfinite().all() for x in parts.values())
    assert all(not p.grad.any() for p in students.students["gkd"].parameters() if p.grad is not None)


def test_what_can_not_write_is_refused(tmp_path: Path) -> None:
    for name, value in {"on_policy": 1.5, "max_new_tokens": 0, "sampling_temperature": -1.0}.items():
        with pytest.raises(BadInput, match=f"{name} {value}: expected"):
            GKD(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"every 2: expected 1 or more steps, and 1 without on_policy"):
        GKD(every=2)
    with pytest.raises(BadInput, match=r"variants.gkd.every 2: expected 1, or texts that are the same in each epoch"):
        module({"gkd": gkd(every=2)}).check_data(text(tmp_path))
    with pytest.raises(BadInput, match=r"strategy LocalSGD: expected methods with every 1"):
        LocalSGD().check_module(module({"gkd": gkd(every=2)}))
    with pytest.raises(BadInput, match="objectives GKD: expected parts with on_policy 0"):
        Sum([GKD(on_policy=0.5), Hinton()])
    with pytest.raises(BadInput, match=r"variants.a.on_policy 0.5: expected 0 for inputs that are no texts"):
        Distillation(net(), {"a": (net(seed=2), GKD(on_policy=0.5))}, SHAPE)
    with pytest.raises(BadInput, match=r"variants.dml.peers gkd: expected students with on_policy 0"):
        module({"gkd": gkd(), "dml": DML(["gkd"])})
    with pytest.raises(BadInput, match=r"variants.gkd.on_policy 1.0: expected 0, or `data.pack false`"):
        module({"gkd": gkd()}).check_data(PACKED)
    with pytest.raises(BadInput, match=r"strategy FSDP: expected methods with on_policy 0, or ddp"):
        FSDP().check_module(module({"gkd": gkd()}))


NETS = [
    "--teacher", "GPT", "--teacher.num_layers", "1", "--teacher.embed_dim", "16", "--teacher.num_heads", "2",
    "--student", "GPT", "--student.num_layers", "1", "--student.embed_dim", "8", "--student.num_heads", "2",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("exact", [[], ["--exact", "3"]], ids=["plain", "exact"])
def test_a_killed_run_ends_with_the_same_texts(exact: list[str], tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chat.jsonl", rows(40, 4))
    flags = [
        "--data", "Chat", "--data.path", str(path), "--data.max_length", "60", "--data.validation_size", "4",
        "--data.test_size", "4", *NETS, "--only", "ce", "gkd", "ahead", "--variants.gkd", "GKD",
        "--variants.gkd.on_policy", "0.6", "--variants.gkd.max_new_tokens", "6", "--variants.ahead", "GKD",
        "--variants.ahead.on_policy", "1", "--variants.ahead.every", "4", "--seeds", "1", "--trainer.max_epochs", "2",
        *exact, "--checkpoint_every", "1e-9", "--trainer.log_every_n_steps", "1",
    ]  # fmt: skip
    start(tmp_path / "whole", *flags).check()
    out = tmp_path / "run"
    killed = kill_at(SafePoints, "on_train_batch_start", 6, after=True, since=out / "seed0" / "teacher.json")
    start(out, *flags, before=killed).check(-signal.SIGKILL)
    assert (out / "seed0" / "students.ckpt").exists()
    more = ["--trainer.devices", "2"] if exact else []
    start(out, *flags, *more, "--resume", "true").check()
    assert_same(nets(out), nets(tmp_path / "whole"))
    assert lasting(results(out)) == lasting(results(tmp_path / "whole"))
