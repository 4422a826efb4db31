"""No net, objective or score mixes devices: a training step and an evaluation run on fake tensors of a GPU."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from apprentice.batch import Batch, Mixed
from harness.studies import zoo
from lit_modules import nets, objectives
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.language_model import LitLanguageModel
from lit_modules.tasks import Tokens
from tests.grids import mostly_slow
from tests.language import OF_TEXTS, OF_VITS

GPU = torch.device("cuda", 0)
IMAGES, ROWS, SAMPLES = (3, 32, 32), 8, 64
VIT: dict[str, Any] = {"patch_size": 8, "embed_dim": 16, "num_heads": 2, "num_layers": 1}
# CRD asks whether its constants are known, the others what the tokens are, which tensors without values can't tell.
READS_VALUES = {"CRD", "SequenceLevel", "ULD"}
NETS: dict[str, tuple[Callable[[], LightningModule], tuple[int, ...]]] = {  # a recurrent one's kernel asks for a driver
    "mnist": (lambda: LitClassifier(nets.MNISTNet()), (1, 28, 28)),
    "light": (lambda: LitClassifier(nets.LightNN(dropout=0.1)), IMAGES),
    "resnet": (lambda: LitClassifier(nets.ResNet(8)), IMAGES),
    "wide": (lambda: LitClassifier(nets.WideResNet(10, 1)), IMAGES),
    "vgg": (lambda: LitClassifier(nets.VGG(8)), IMAGES),
    "mobile": (lambda: LitClassifier(nets.MobileNetV2()), IMAGES),
    "shuffle1": (lambda: LitClassifier(nets.ShuffleNetV1()), IMAGES),
    "shuffle2": (lambda: LitClassifier(nets.ShuffleNetV2()), IMAGES),
    "vit": (lambda: LitClassifier(nets.ViT(**VIT, dropout=0.1)), IMAGES),
    "gpt": (lambda: LitLanguageModel(nets.GPT(30, 8, 1, 2, 16)), (8,)),
}


@contextmanager
def on_fakes(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, the module's parameters and buffers are fakes on a GPU; any real tensor of its own is an error."""
    fakes, known = FakeTensorMode(), dict[int, Tensor]()

    def moved(x: Tensor) -> Tensor:
        fake = fakes.from_tensor(x.data)
        with fakes:
            return nn.Parameter(fake.to(GPU), x.requires_grad) if isinstance(x, nn.Parameter) else fake.to(GPU)

    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, x in held.items():
                if x is not None:
                    held[name] = known.setdefault(id(x), moved(x))
    monkeypatch.setattr(Tensor, "backward", lambda *_: None)  # that of a relation; there is none on fakes without a GPU
    with fakes, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # BatchNorm's and the like, which other tests look at
        yield


def batch(shape: tuple[int, ...], classes: int, tokens: bool) -> Batch:
    inputs = torch.zeros(ROWS, *shape, device=GPU, dtype=torch.int64 if len(shape) == 1 else torch.float32)
    labels = torch.zeros(ROWS, *(shape if tokens else ()), device=GPU, dtype=torch.int64)
    index = torch.arange(ROWS, device=GPU)
    return Batch(inputs, labels, index, index, ROWS, 1, 0)


def are_there(*found: Any) -> None:
    tensors = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
    assert tensors
    assert all(isinstance(x, FakeTensor) and x.device == GPU for x in tensors), [str(x.device) for x in tensors]


@pytest.mark.parametrize("name", mostly_slow(NETS, "light", "resnet", "vit", "gpt"))
def test_a_net_stays_on_its_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = NETS[name]
    module = make()
    with on_fakes(module, monkeypatch):
        rows = batch(shape, 2, tokens=name == "gpt")
        are_there(module.shard_step(rows))  # type: ignore[operator]
        module.eval()
        for logits in module.predict(rows.inputs).values():  # type: ignore[operator]
            are_there(logits, module.scores_of("").of_sample(logits, rows.labels))  # type: ignore[operator]


METHODS = sorted({*zoo.methods({}).values()} - READS_VALUES - OF_TEXTS - OF_VITS)


QUICK = [(method, mixed) for method in ("Hint", "RKD", "ReviewKD", "VID") for mixed in (False, True)]
OF_LABELS = "CrossEntropy", "DKD", "DeiTToken", "NKD", "RLD"
CASES = {*QUICK, *((method, False) for method in METHODS), *((method, True) for method in OF_LABELS)}


@pytest.mark.parametrize(("method", "mixed"), mostly_slow(sorted(CASES), *QUICK))
def test_an_objective_stays_on_its_device(method: str, mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    student = nets.ViT(**VIT, distillation_token=True) if method == "DeiTToken" else nets.ResNet(8)
    module = Distillation(nets.ResNet(8), {"a": (student, getattr(objectives, method)())}, samples=SAMPLES)
    with on_fakes(module, monkeypatch):
        rows = batch(IMAGES, 10, tokens=False)
        if mixed:
            rows = rows._replace(mixed=Mixed(rows.labels, torch.full((ROWS,), 0.5, device=GPU)))
        are_there(module.shard_step(rows))
        are_there(*module.eval().evaluate(rows, beside=True))


@pytest.mark.parametrize("method", ["MiniLM", *sorted(OF_VITS)])
def test_an_objective_of_vits_stays_on_its_device(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    students = {"a": (nets.ViT(**VIT), getattr(objectives, method)())}
    module = Distillation(nets.ViT(**VIT), students, samples=SAMPLES)
    with on_fakes(module, monkeypatch):
        are_there(module.shard_step(batch(IMAGES, 10, tokens=False)))


@pytest.mark.parametrize("method", sorted(OF_TEXTS - READS_VALUES))
def test_an_objective_of_texts_stays_on_its_device(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: dict[str, Any] = {"input_shape": (8,), "num_classes": 30, "task": Tokens(), "input_dtype": torch.int64}
    other = {"mixer": "windowed"} if method == "Linearize" else {}
    students = {"a": (nets.GPT(30, 8, 1, 2, 16, **other), getattr(objectives, method)())}
    module = Distillation(nets.GPT(30, 8, 1, 2, 16), students, samples=SAMPLES, **shapes)
    with on_fakes(module, monkeypatch):
        are_there(module.shard_step(batch((8,), 30, tokens=True)))
