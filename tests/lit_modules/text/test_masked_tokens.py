"""Tokens without a label, -100, count nowhere: losses, scores and values of samples are those of the other tokens."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from apprentice.batch import IGNORED, Batch
from apprentice.errors import BadInput
from harness.reports import samples
from lit_modules import objectives
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.language_model import LitLanguageModel
from lit_modules.nets import Outputs
from lit_modules.tasks import Tokens
from lit_modules.tasks.scores import fidelity
from tests.grids import mostly_slow
from tests.language import gpt
from tests.training import LinesLogger, assert_same, fit, on, trainer, weights

B, T, V = 5, 8, 11
SHAPES: dict[str, Any] = {"input_shape": (T,), "num_classes": V, "task": Tokens(), "input_dtype": torch.int64}


def texts(rows: int = B, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and labels (rows, T): the first row counts whole, the second not at all, the others in part."""
    g = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(V, (rows, T), generator=g) for _ in range(2))
    counts = torch.rand(rows, T, generator=g) < torch.rand(rows, 1, generator=g)
    counts[0], counts[1], counts[2, 0] = True, False, True
    return tokens, labels.where(counts, IGNORED)


def module(**objectives: objectives.Objective) -> Distillation:
    small = {"num_layers": 1, "tie_weights": False}
    students: Any = {name: (gpt(V, T, **small), objective) for name, objective in objectives.items()}
    return Distillation(gpt(V, T, seed=1, tie_weights=False), students, **SHAPES).double().eval()


def step(made: Distillation, tokens: Tensor, labels: Tensor, teacher: Outputs | None = None) -> tuple[Tensor, Any]:
    batch = Batch.of((tokens, labels), 0)
    outputs = made.ask_teacher(tokens), made(tokens)[1]
    return made.losses((teacher or outputs[0], outputs[1]), batch)


OBJECTIVES: dict[str, Callable[[], objectives.Objective]] = {
    "ce": objectives.CrossEntropy,
    "smooth": lambda: objectives.CrossEntropy(0.1),
    "kd": objectives.Hinton,
    "entropy": lambda: objectives.Hinton(teacher_entropy=True),
    "standardized": lambda: objectives.Hinton(standardize=True),
    "reverse": objectives.ReverseKL,
    "js": objectives.JensenShannon,
    "mse": objectives.LogitMSE,
    "dkd": lambda: objectives.DKD(warmup=0),
    "nkd": objectives.NKD,
    "rld": objectives.RLD,
    "ttm": objectives.TTM,
    "tfkd": objectives.TfKD,
    "ctkd": objectives.CTKD,
    "dist": objectives.DIST,
    "gkd": objectives.GKD,
    "skew": objectives.SkewKL,
    "akl": objectives.AdaptiveKL,
    "tv": objectives.TotalVariation,
    "sum": lambda: objectives.Sum([objectives.Hinton(), objectives.GKD(1), objectives.LogitMSE()], [1.0, 0.5, 0.1]),
}
WHOLE: dict[str, Callable[[], objectives.Objective]] = {
    "cosine": objectives.Cosine,
    "sp": objectives.SP,
    "pkt": objectives.PKT,
    "rkd": objectives.RKD,
    "cc": objectives.CC,
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss_is_that_of_the_tokens_that_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rows of their own, (n, V), in which there is nothing else."""
    made, (tokens, labels) = module(a=OBJECTIVES[name]()), texts()
    teacher, students = made.ask_teacher(tokens), made(tokens)[1]
    loss, parts = made.losses((teacher, students), Batch.of((tokens, labels), 0))
    counts, count = labels != IGNORED, int((labels != IGNORED).sum())
    rows = torch.arange(count)

    def chosen(outputs: Outputs) -> Outputs:
        kept = counts.flatten()
        features = {path: x.repeat_interleave(T)[kept] for path, x in outputs.features.items() if x.dim() == 1}
        return Outputs(outputs.logits[counts], features)

    flat = Batch(tokens[counts], labels[counts], rows, rows, count, 1, 0)
    monkeypatch.setattr(made.task, "counts", lambda _: {})  # of samples with one label each
    expected, theirs = made.losses((chosen(teacher), {"a": chosen(students["a"])}), flat)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    batch = Batch.of((tokens, labels), 0)
    for what, values in theirs.items():
        torch.testing.assert_close(batch.mean(parts[what]).double(), flat.mean(values).double(), rtol=1e-12, atol=1e-12)


def test_cross_entropy_and_hintons_term_are_the_formulas() -> None:
    made, (tokens, labels) = module(a=objectives.Hinton(temperature=2.0)), texts()
    loss, parts = step(made, tokens, labels)
    student, teacher = made.students["a"].net(tokens), made.teacher(tokens)
    ce, kd, count = torch.zeros(()), torch.zeros(()), 0
    for row in range(B):
        for t in range(T):
            if labels[row, t] != IGNORED:
                p, q = (teacher[row, t] / 2).softmax(0), (student[row, t] / 2).softmax(0)
                ce, kd = ce - student[row, t].log_softmax(0)[labels[row, t]], kd + 4 * (p * (p / q).log()).sum()
                count += 1
    torch.testing.assert_close(loss, (0.75 * ce + 0.25 * kd) / count, rtol=1e-12, atol=1e-12)
    for what, expected in {"a/ce": ce, "a/kd": kd, "a/bpc": ce / math.log(2)}.items():
        torch.testing.assert_close(parts[what].mean(), expected / count, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_compared_of_a_whole_text_has_no_masked_token(name: str) -> None:
    """Other outputs for them change no loss and get no gradient."""
    made, (tokens, labels) = module(a=WHOLE[name]()), texts()
    teacher, students = made.ask_teacher(tokens), made(tokens)[1]["a"]
    counts, found = labels != IGNORED, []
    for noise in (0.0, 3.0):
        other, own = (
            x.map(lambda z, noise=noise: (z + noise * torch.randn_like(z) * ~counts[..., None]).detach())
            for x in (teacher, students)
        )
        leaves = [x.requires_grad_() for x in own.tensors()]
        loss = made.losses((other, {"a": own}), Batch.of((tokens, labels), 0))[0]
        gradients = torch.autograd.grad(loss, leaves)
        assert all((g[~counts] == 0).all() for g in gradients)
        found.append((loss, *(g[counts] for g in gradients)))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_texts_weigh_what_they_have_of_tokens() -> None:
    made, (tokens, labels) = module(a=objectives.Cosine(ce_weight=0.0, cosine_weight=1.0)), texts()
    teacher, students = made.ask_teacher(tokens), made(tokens)[1]["a"]
    counts, total = labels != IGNORED, torch.zeros(())
    (f_s,), (f_t,) = students.features.values(), teacher.features.values()
    for row in range(B):
        if counts[row].any():
            distance = 1 - F.cosine_similarity(f_s[row][counts[row]].flatten(), f_t[row][counts[row]].flatten(), 0)
            total = total + distance * counts[row].sum() / counts.sum()
    torch.testing.assert_close(step(made, tokens, labels)[0], total, rtol=1e-9, atol=1e-9)


def test_mutual_learning_reads_no_masked_token() -> None:
    made, (tokens, labels) = module(a=objectives.DML(["b"]), b=objectives.DML(["a"])), texts()
    with torch.no_grad():
        made.students["b"].net.head.weight.add_(torch.randn(V, 12, dtype=torch.float64))
    _, parts = step(made, tokens, labels)
    counts = labels != IGNORED
    own, peer = (made.students[name].net(tokens)[counts].log_softmax(-1) for name in ("a", "b"))
    torch.testing.assert_close(parts["a/mutual"].mean(), (peer.exp() * (peer - own)).sum(-1).mean())


def test_a_batch_in_which_nothing_counts_trains_nothing() -> None:
    made, (tokens, _) = (
        module(a=objectives.Sum([objectives.Hinton(), objectives.Cosine(), objectives.JensenShannon()])).train(),
        texts(),
    )
    loss, parts = step(made, tokens, torch.full((B, T), IGNORED))
    loss.backward()
    assert loss == 0
    assert all((values == 0).all() for values in parts.values())
    assert all(p.grad is None or (p.grad == 0).all() for p in made.students.parameters())


def test_values_of_samples_are_means_over_their_own_tokens() -> None:
    made, (tokens, labels) = module(a=objectives.Hinton()), texts()
    student, teacher = made.students["a"].net(tokens), made.teacher(tokens)
    found = Tokens(1.5).scores().of_sample(student, labels) | fidelity(student, teacher, labels)
    for row in range(B):
        kept = labels[row] != IGNORED
        assert found["tokens"][row] == kept.sum()
        if kept.any():
            bits = 1.5 * F.cross_entropy(student[row][kept], labels[row][kept]) / math.log(2)
            torch.testing.assert_close(found["bpc"][row], bits)


# Training

ROWS = 30  # in batches of 12 and, last, of 6


class Masked(LightningDataModule):
    """Plain pairs, the validation's those of training."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        samples, place = TensorDataset(*texts(ROWS, 3)), self.trainer.distributed_sampler_kwargs
        sampler = DistributedSampler(samples, **{"num_replicas": 1, "rank": 0} | (place or {}), shuffle=False)
        return DataLoader(samples, self.batch_size, sampler=sampler)

    val_dataloader = test_dataloader = train_dataloader


def trained(kind: str, size: int, place: str = "auto 1", **options: Any) -> dict[str, Tensor]:
    made: LightningModule
    if kind == "lm":
        made = LitLanguageModel(gpt(V, T, tie_weights=False), warmup_steps=2)
    else:
        names = ("dist",) if kind == "dist" else ("ce", "kd")
        students: Any = {name: (gpt(V, T, num_layers=1, tie_weights=False), OBJECTIVES[name]()) for name in names}
        made = Distillation(gpt(V, T, seed=1, tie_weights=False), students, **SHAPES)
    options |= {"precision": "64-true", "use_distributed_sampler": False}
    return weights(fit(made, Masked(size), **on(place), **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Tensor]]:
    return {kind: trained(kind, 12) for kind in ("lm", "kd", "dist")}


CASES = [  # the place, rows of a rank's batch, batches of a step
    ("ddp 2", 6, 1), ("ddp 3", 4, 1), ("ddp 3 exact 3", 12, 1), ("pipeline 2", 12, 1), ("pipeline 2 exact 3", 12, 1),
    ("auto 1", 4, 3), ("ddp 2", 2, 3), ("ddp 2 exact 2", 4, 3),
]  # fmt: skip
KINDS = [
    *((*case, ("lm", "kd")[number % 2]) for number, case in enumerate(CASES)), *((*CASES[i], "dist") for i in (0, 2)),
]  # fmt: skip
QUICK = [kind for kind in KINDS if kind[:3] in (CASES[1], CASES[2])]


@pytest.mark.parametrize(("place", "size", "batches", "kind"), mostly_slow(KINDS, *QUICK))
def test_ranks_and_micro_batches_are_one(place: str, size: int, batches: int, kind: str, alone: dict[str, Any]) -> None:
    assert_same(alone[kind], trained(kind, size, place, accumulate_grad_batches=batches), 1e-9)


def test_an_epochs_figures_are_means_over_its_tokens(tmp_path: Any) -> None:
    logger, net = LinesLogger(tmp_path / "lines"), gpt(V, T, tie_weights=False)
    made = LitClassifier(net, V, optimizer=partial(torch.optim.SGD, lr=0.0), task=Tokens())
    fit(made, Masked(4), logger=logger, log_every_n_steps=1, max_epochs=1)  # type: ignore[arg-type]
    tokens, labels = texts(ROWS, 3)
    expected = F.cross_entropy(net(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED).item()
    for tag in ("train/loss_epoch", "val/loss"):
        assert logger.values(tag) == pytest.approx([expected], abs=5e-6)
    batches = zip(tokens.split(4), labels.split(4), strict=True)
    each = [F.cross_entropy(net(x).flatten(0, 1), y.flatten()).item() for x, y in batches]
    assert logger.values("train/loss") == pytest.approx(each, abs=5e-6)


def test_a_batch_with_ignored_tokens_says_what_its_labels_weigh() -> None:
    tokens, labels = texts(4)
    batch = Batch(tokens, labels, torch.arange(4), torch.arange(4), 4, 1, 0)
    loader: Any = DataLoader([batch], batch_size=None, collate_fn=lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"^data labels of -100: expected a Batch with its label_weight"):
        trainer(limit_val_batches=0).fit(LitLanguageModel(gpt(V, T, tie_weights=False)), loader, loader)


def test_a_record_has_the_texts_that_have_tokens() -> None:
    values = {"place": torch.arange(3), "bpc": torch.tensor([2.0, 0.0, 4.0]), "tokens": torch.tensor([3.0, 0.0, 1.0])}
    means, kept = samples.summarize(Tokens(), values | {"kl": torch.tensor([1.0, 0.0, 3.0])})
    assert (means, kept) == ({"test_kl": 1.5}, {"test_sample_bpc": [2.0, 4.0]})
