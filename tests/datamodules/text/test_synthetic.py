"""Synthetic texts follow their rules, from keys alone: the same in any company, on any number of devices."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam

from apprentice.batch import IGNORED
from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from datamodules import Copying, Needle, Recall
from datamodules.text import synthetic
from datamodules.text.synthetic import SyntheticTexts
from harness.runs.safepoints import SafePoints
from lit_modules.classifier import LitClassifier
from lit_modules.nets import GPT
from lit_modules.tasks import Tokens, task_of
from tests.commands import kill_at, lasting, nets, results, start
from tests.training import assert_agree, outcome

SIZES = {"train_size": 50, "validation_size": 7, "test_size": 20}
KINDS: dict[str, Callable[..., SyntheticTexts]] = {
    "recall": lambda **o: Recall(16, 12, 3, **SIZES | o),
    "random": lambda **o: Recall(16, 12, 3, filler="random", **SIZES | o),
    "copying": lambda **o: Copying(8, 5, **SIZES | o),
    "needle": lambda **o: Needle(9, 10, **SIZES | o),
}


def texts(data: SyntheticTexts, part: str = "train") -> tuple[Tensor, Tensor]:
    inputs, labels = data.samples(part, torch.arange(data.sizes[part]))
    assert inputs.shape == labels.shape == (data.sizes[part], data.block_size)
    assert (labels != IGNORED).sum(1).eq(data.answers).all()
    assert int(inputs.min()) >= 0
    assert int(inputs.max()) < data.vocab_size
    return inputs, labels


@pytest.mark.parametrize("filler", ["zeros", "random"])
def test_recall_is_its_rule(filler: Any) -> None:
    for text, labels in zip(*texts(Recall(32, 21, 4, filler=filler, train_size=200)), strict=True):
        keys, values = text[0:8:2], text[1:8:2]
        assert keys.unique().numel() == values.unique().numel() == 4
        assert set(keys.tolist()) <= set(range(1, 10))
        assert set(values.tolist()) <= set(range(10, 21))
        asked = (labels != IGNORED).nonzero()[:, 0]
        assert (asked >= 8).all()
        assert (asked % 2 == 0).all()
        assert sorted(text[asked].tolist()) == sorted(keys.tolist())
        value_of = dict(zip(keys.tolist(), values.tolist(), strict=True))
        assert [value_of[k] for k in text[asked].tolist()] == labels[asked].tolist()
        if filler == "zeros":
            assert text.count_nonzero() == 12


def test_places_of_recall_are_drawn_by_their_weights_and_none_twice() -> None:
    """Of two keys, and places 1 to 4: that of the first by w / Σ w, that of the second by what the first left."""
    count, power = 20_000, 0.5
    inputs, _ = texts(Recall(12, 8, 2, power, train_size=count))
    rest = inputs[:, 4:].view(count, 4, 2)
    assert (rest[:, :, 1] == 0).all()
    first = (rest[:, :, 0] == inputs[:, :1]).int().argmax(1)
    second = (rest[:, :, 0] == inputs[:, 2:3]).int().argmax(1)
    weights = torch.tensor([1.0, 2, 3, 4]).double() ** (power - 1)
    p = weights / weights.sum()
    for i in range(4):
        for j in range(4):
            expected = 0.0 if i == j else float(p[i] * p[j] / (1 - p[i]))
            share = float(((first == i) & (second == j)).double().mean())
            assert abs(share - expected) <= 4 * (expected * (1 - expected) / count) ** 0.5
    for tokens, least, most in ((inputs[:, 0], 1, 4), (inputs[:, 1], 4, 8)):  # keys and values: all alike
        shares = tokens.bincount(minlength=8)[least:most] / count
        assert (shares - 1 / (most - least)).abs().max() < 4 * 0.5 / count**0.5


def test_copying_and_needle_are_their_rules() -> None:
    inputs, labels = texts(Copying(8, 5, train_size=4_000))
    assert torch.equal(labels[:, 4:], inputs[:, :4])
    assert torch.equal(inputs[:, 5:], inputs[:, :3])
    assert (inputs[:, 4] == 0).all()
    shares = inputs[:, :4].flatten().bincount(minlength=5) / 16_000
    assert shares[0] == 0
    assert (shares[1:] - 0.25).abs().max() < 4 * 0.5 / 16_000**0.5
    inputs, labels = texts(Needle(9, 10, train_size=7_000))
    is_key = inputs == inputs[:, -1:]
    assert (is_key.sum(1) == 2).all()
    place = is_key.int().argmax(1)
    assert torch.equal(inputs[torch.arange(7_000), place + 1], labels[:, -1])
    assert set(inputs[:, -1].unique().tolist()) == {1, 2, 3, 4}
    assert inputs[~is_key].min() == 5
    assert (place.bincount(minlength=9)[:7] / 7_000 - 1 / 7).abs().max() < 4 * 0.5 / 7_000**0.5


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_depends_on_seed_part_and_number_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, labels = texts(KINDS[kind]())
    monkeypatch.setattr(synthetic, "DRAWN", 100)
    more, their_labels = texts(KINDS[kind](train_size=80, test_size=3, validation_size=0, batch_size=3))
    assert torch.equal(more[:50], inputs)
    assert torch.equal(their_labels[:50], labels)
    assert KINDS[kind](batch_size=3).fingerprint() == KINDS[kind]().fingerprint()
    assert not torch.equal(texts(KINDS[kind](seed=1))[0], inputs)
    assert not torch.equal(texts(KINDS[kind](test_size=50), "test")[0], inputs)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_ranks_share_batches_and_a_resumed_epoch_goes_on(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = KINDS["recall"](batch_size=8)
    (whole, *later), seen = list(data.train_dataloader()), []
    for rank in range(replicas):
        monkeypatch.setattr(data, "_rank_and_replicas", lambda rank=rank: (rank, replicas))
        monkeypatch.setattr(data, "_position", lambda: 0)
        part = next(iter(data.train_dataloader()))
        assert part.label_weight == whole.label_weight == 16 / 3
        seen.append(part)
    rows = torch.cat([part.rows for part in seen]).argsort()
    assert torch.equal(torch.cat([part.inputs for part in seen])[rows], whole.inputs)
    assert torch.equal(torch.cat([part.labels for part in seen])[rows], whole.labels)
    monkeypatch.setattr(data, "_rank_and_replicas", lambda: (0, 1))
    monkeypatch.setattr(data, "_position", lambda: 1)
    loader = data.train_dataloader()
    loader.sampler.set_epoch(0)
    resumed = list(loader)
    assert [batch.index.tolist() for batch in resumed] == [batch.index.tolist() for batch in later]
    assert torch.equal(resumed[-1].labels, later[-1].labels)


def net() -> GPT:
    return with_seed(0, lambda: GPT(12, 16, 1, 2, 8))


def test_loss_and_scores_are_means_over_labels_that_count() -> None:
    data = KINDS["recall"](batch_size=50)
    task = task_of(data)
    assert isinstance(task, Tokens)
    assert task.metric.word == "right answers"
    module, batch = LitClassifier(net(), task=task).double(), next(iter(data.train_dataloader()))
    logits = module.net(batch.inputs.long())
    known = batch.labels != IGNORED
    expected = -logits.log_softmax(-1)[known].gather(1, batch.labels[known][:, None]).mean()
    right = (logits.argmax(-1) == batch.labels)[known].double().mean()
    loss, parts = module.losses(logits, batch)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(parts["answers"].double().mean(), right, atol=1e-6, rtol=0)
    scores = task.scores()
    scores.update(logits, batch.labels)
    torch.testing.assert_close(scores.compute()["answers"], right, atol=1e-9, rtol=0)
    torch.testing.assert_close(scores.compute()["loss"], expected.detach(), atol=1e-9, rtol=0)
    sample = scores.of_sample(logits, batch.labels)
    assert sample["tokens"].eq(3).all()
    torch.testing.assert_close(sample["answers"].double().mean(), right, atol=1e-6, rtol=0)


def test_a_fit_is_the_same_on_any_number_of_devices(tmp_path: Path) -> None:
    runs = []
    for devices in (1, 3):
        data = KINDS["recall"](batch_size=17)
        module = LitClassifier(net(), optimizer=partial(Adam, lr=0.01), task=task_of(data))
        tags, options = ("train/loss", "val/answers"), {"precision": "64-true", "max_epochs": 2}
        runs.append(outcome(module, data, tmp_path, tags, devices, **options))
    assert_agree(*runs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Recall", "Copying", "Needle"])
def test_kd_trains_on_it_and_resumes(name: str, tmp_path: Path) -> None:
    """A net that is judged by its answers, in results, tables and TensorBoard."""
    flags = f"--data {name} --data.train_size 96 --data.validation_size 32 --data.test_size 32 --data.batch_size 32 "
    flags += "--teacher GPT --student GPT --teacher.num_layers 1 --teacher.embed_dim 16 --student.num_layers 1 "
    flags += "--student.embed_dim 16 --only ce --seeds 1"
    line = [*flags.split(), "--trainer.max_epochs", "2", "--checkpoint_every", "1e-9"]
    start(tmp_path / "whole", *line).check()
    killed = kill_at(SafePoints, "on_train_batch_start", 5, after=True)
    start(tmp_path / "parts", *line, before=killed).check(-signal.SIGKILL)
    start(tmp_path / "parts", *line, "--resume", "true").check()
    facts = results(tmp_path / "whole")
    assert facts["metric"]["name"] == "test_answers"
    assert "test_answers" in (tmp_path / "whole" / "results.json").read_text()
    assert lasting(results(tmp_path / "parts")) == lasting(facts)
    whole, parts = nets(tmp_path / "whole"), nets(tmp_path / "parts")
    assert all(torch.equal(whole[key], parts[key]) for key in {*whole, *parts})


def test_bad_input_is_one_line() -> None:
    for match, make in {
        r"data.pairs 0: expected a whole number of at least 1": lambda: Recall(pairs=0),
        r"data.block_size 14: expected an even number of at least 16, for 4 pairs": lambda: Recall(14),
        r"data.block_size 17: expected an even": lambda: Recall(17),
        r"data.vocab_size 9: expected at least 10": lambda: Recall(vocab_size=9),
        r"data.power 0: expected above 0": lambda: Recall(power=0),
        r"data.filler x: expected zeros or random": lambda: Recall(filler="x"),  # type: ignore[arg-type]
        r"data.block_size 7: expected an even number": lambda: Copying(7),
        r"data.vocab_size 2: expected a whole number of at least 3": lambda: Copying(vocab_size=2),
        r"data.block_size 2: expected at least 3": lambda: Needle(2),
        r"data.vocab_size 3: expected at least 4": lambda: Needle(vocab_size=3),
        r"data.train_size 0: expected a whole number of at least 1": lambda: Recall(train_size=0),
        r"data.batch_size 0: expected": lambda: Recall(batch_size=0),
        r"data.train_size 100000000000: expected fewer texts: these": lambda: Recall(train_size=10**11).setup(),
    }.items():
        with pytest.raises(BadInput, match=match):
            make()
    assert KINDS["recall"](validation_size=0).val_dataloader() is not None
