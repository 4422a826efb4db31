"""What a plain Trainer, loader or net of others gives a module: it works, or one line says what was expected."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from apprentice.batch import Batch
from apprentice.errors import BadInput
from harness.runs.quiet import quiet
from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, LightNN
from lit_modules.objectives import (
    DKD,
    Cosine,
    CrossEntropy,
    Hint,
    Hinton,
    JensenShannon,
    LogitMSE,
    Objective,
    ReverseKL,
)
from lit_modules.objectives.base import kl
from strategies import DDP, PipelineStrategy
from tests.commands import bad_input
from tests.grids import mostly_slow
from tests.training import SHAPE, assert_same, classifier, distil, distillation, net, trainer, weights

ROWS, SIZE = 24, 8
IMAGES = torch.rand(ROWS, *SHAPE, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(ROWS) % 10
KINDS: dict[str, Any] = {"distillation": lambda: distillation(["ce", "kd"]), "classifier": classifier}


class Samples(Dataset):
    def __init__(self, sample: Callable[[int], Any]) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> Any:
        return self.sample(i)


def loader(images: Tensor = IMAGES, labels: Tensor = LABELS, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(images, labels), **{"batch_size": SIZE} | options)


def late(label: int) -> DataLoader:
    labels = LABELS.clone()
    labels[-2] = label
    return loader(labels=labels)


def fitted(module: LightningModule, train: DataLoader, val: DataLoader | None = None, **options: Any) -> Any:
    with quiet():
        trainer(**{"max_epochs": 1} | options).fit(module, train, val or loader())
    return module


BAD: dict[str, tuple[Callable[[], DataLoader], str]] = {
    "hidden": (lambda: late(-1), "labels from -1 to 9: expected 0 to 9, the classes"),
    "ignored": (lambda: late(-100), "labels from -100 to 9: expected 0 to 9, the classes"),
    "one too many": (lambda: late(10), "labels from 0 to 10: expected 0 to 9, the classes"),
    "float": (lambda: loader(labels=LABELS.float()), "labels of float32: expected classes as whole numbers"),
    "one-hot": (lambda: loader(labels=F.one_hot(LABELS, 10)), "labels (8, 10): expected (8,), a whole number for each"),
    "column": (lambda: loader(labels=LABELS[:, None]), "labels (8, 1): expected (8,), a whole number for each"),
    "dict": (
        lambda: DataLoader(Samples(lambda i: {"image": IMAGES[i], "label": LABELS[i]}), SIZE),
        "a batch that is a dict of image, label: expected batches (inputs, labels), two tensors",
    ),
    "triple": (
        lambda: DataLoader(Samples(lambda i: (IMAGES[i], LABELS[i], i)), SIZE),
        "a batch (Tensor, Tensor, Tensor): expected batches (inputs, labels), two tensors",
    ),
    "size": (
        lambda: loader(torch.rand(ROWS, 1, 12, 12)),
        "inputs (1, 12, 12) of float32: expected inputs that the nets take; they say: addmm: mat1 and mat2 shapes",
    ),
    "uint8": (lambda: loader((255 * IMAGES).byte()), "inputs (1, 8, 8) of uint8: expected inputs that the nets take"),
    "all dropped": (lambda: loader(batch_size=ROWS + 1, drop_last=True), "no training batch: expected at least one"),
    "all None": (lambda: loader(collate_fn=lambda _: None), "no training batch: expected batches (inputs, labels)"),
    "no rows": (
        lambda: DataLoader([(IMAGES[:n], LABELS[:n]) for n in (SIZE, 0)], batch_size=None),  # type: ignore[arg-type]
        "a batch of 0 rows: expected at least one row",
    ),
}


@pytest.mark.filterwarnings("ignore:Total length of", "ignore:train_dataloader yielded None")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BAD)
def test_a_batch_that_cannot_be_used_is_one_line(name: str, kind: str) -> None:
    make, expected = BAD[name]
    assert bad_input(fitted, KINDS[kind](), make()).startswith(f"data {expected}")


@pytest.mark.parametrize("kind", KINDS)
def test_so_is_one_of_the_validation(kind: str) -> None:
    with pytest.raises(BadInput, match=r"^data labels from -1 to 9: expected 0 to 9, the classes$"):
        fitted(KINDS[kind](), loader(), late(-1))


@pytest.mark.parametrize("strategy", [lambda: DDP(timeout=60, exact=2), PipelineStrategy], ids=["exact", "pipeline"])
def test_so_is_one_under_strategies_that_cut_batches(strategy: Callable[[], Any]) -> None:
    with pytest.raises(Exception, match=r"data labels from \d+ to 10: expected 0 to 9, the classes"):
        fitted(distillation(["ce", "kd"]), late(10), devices=2, strategy=strategy())


class Hooked(LightningDataModule):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.parametrize(("datamodule", "label"), [(None, 9), (None, 10), (Hooked(), 10)])
def test_labels_are_read_before_they_go_to_a_gpu(datamodule: Any, label: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, it would wait for the GPU. A hook of the data module may change them; then they are not checked."""
    made, far = classifier(), LABELS.to("meta")
    monkeypatch.setattr(type(made), "device", torch.device("cuda"))
    made._trainer = trainer()
    made._trainer.datamodule = datamodule
    made.reader.inspect((IMAGES, LABELS.clamp(max=8).where(LABELS != 9, label)), made)
    logits, batch = torch.empty(ROWS, 10, device="meta"), Batch(IMAGES, far, far, far, ROWS, 1, 0)
    if datamodule is None and label == 10:
        line = bad_input(made.reader.check_labels, logits, batch, True)
        assert line == "data labels from 0 to 10: expected 0 to 9, the classes"
    else:
        made.reader.check_labels(logits, batch, True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_other_whole_numbers_are_labels(dtype: torch.dtype, kind: str) -> None:
    one, other = (fitted(KINDS[kind](), loader(labels=labels)) for labels in (LABELS, LABELS.to(dtype)))
    assert_same(weights(one), weights(other))


@pytest.mark.parametrize("kind", KINDS)
def test_images_get_the_type_of_the_nets(kind: str) -> None:
    one, other = (fitted(KINDS[kind](), loader(images)) for images in (IMAGES, IMAGES.double()))
    assert_same(weights(one), weights(other))


OBJECTIVES: dict[str, Callable[[], Objective]] = {"kd": Hinton, "cosine": Cosine, "hint": Hint, "ce": CrossEntropy}
CUT = {"plain": (1, "auto"), "pipeline": (2, "pipeline")}


@pytest.mark.parametrize("where", mostly_slow(CUT, "plain"))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_teacher_computes_in_its_own_type(dtype: torch.dtype, where: str) -> None:
    """The students see what it gives, as float32: equal to a float32 net with these outputs."""
    devices, strategy = CUT[where]

    def distilled(teacher: nn.Module) -> Any:
        students: Any = {name: (net(), make()) for name, make in OBJECTIVES.items()}
        cut: Any = PipelineStrategy(timeout=60) if strategy == "pipeline" else strategy
        made = Distillation(teacher, students, input_shape=SHAPE)
        return fitted(made, loader(), devices=devices, strategy=cut)

    teacher = net(DeepNN, seed=1).to(dtype)
    made = distilled(teacher)
    tolerance = 1e-5 if dtype == torch.float64 else 2e-2
    assert_same(weights(made), weights(distilled(net(DeepNN, seed=1))), tolerance)
    assert next(teacher.parameters()).dtype == dtype


def module(*nets: nn.Module, teacher: nn.Module | None = None) -> Distillation:
    students: Any = {name: (each, Hinton()) for name, each in zip("ab", nets, strict=False)}
    return Distillation(teacher or net(DeepNN, seed=1), students, input_shape=SHAPE)


def test_a_teacher_needs_no_parameters() -> None:
    fitted(module(net(), teacher=nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(10))), loader())


def test_students_and_teacher_share_no_parameter() -> None:
    one, teacher = net(), net(DeepNN, seed=1)
    with pytest.raises(BadInput, match=r"variants.b LightNN: .* features.0.weight is also a parameter of student a$"):
        module(one, one)
    half = net(DeepNN)
    half.classifier = teacher.classifier
    for student, path in ((half, "classifier.0"), (teacher, "features.0")):
        with pytest.raises(BadInput, match=rf"variants.a DeepNN: .* {path}.weight is also a parameter of the teacher$"):
            module(student, teacher=teacher)


def test_a_frozen_net_is_not_trained() -> None:
    expected = "LightNN: expected a net that can be trained; all of its parameters are frozen$"
    frozen = classifier()
    frozen.net.requires_grad_(False)
    for made, flag in ((module(net(), net().requires_grad_(False)), "variants.b"), (frozen, "net")):
        with pytest.raises(BadInput, match=f"^{flag} {expected}"):
            fitted(made, loader())


class Lacks(LightNN):
    def __init__(self, value: float) -> None:
        super().__init__(input_shape=SHAPE)
        self.value = value

    def forward(self, images: Tensor) -> Tensor:
        logits = super().forward(images).clone()
        logits[:, 3] = self.value
        return logits


def test_a_class_that_a_teacher_excludes_counts_nothing() -> None:
    z, logits = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    z[:, 2] = -torch.inf
    p, log_q = z[:, [0, 1, 3]].softmax(-1), logits.log_softmax(-1)
    expected = (p * (p.log() - log_q[:, [0, 1, 3]])).sum(-1)
    found = kl(z.log_softmax(-1), log_q)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (found, expected)]
    torch.testing.assert_close(*gradients)
    for objective in (Hinton, JensenShannon):
        made = distil({"a": objective()}, Lacks(-torch.inf))
        assert not fitted(made, loader(labels=LABELS % 3)).failed


@pytest.mark.parametrize(
    ("value", "objective"),
    [
        (-torch.inf, ReverseKL()),
        (-torch.inf, LogitMSE()),
        (-torch.inf, DKD()),
        (-torch.inf, Hinton(standardize=True)),
        (torch.nan, Hinton()),
        (torch.nan, Hinton(standardize=True)),
        (torch.inf, JensenShannon()),
    ],
)
def test_a_teacher_that_gives_no_finite_loss_is_refused(value: float, objective: Objective) -> None:
    with pytest.raises(BadInput, match=r"^variants.a \w+: expected a teacher with finite logits; for zeros it gives"):
        distil({"a": objective}, Lacks(value))
