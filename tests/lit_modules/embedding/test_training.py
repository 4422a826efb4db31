"""Students that embed as a teacher does: the same on any number of processes, alone and in company."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from datamodules import Digits
from lit_modules.distillation import Distillation
from lit_modules.embedding.neighbours import shared_neighbours
from lit_modules.embedding.task import Embedding
from lit_modules.nets import DeepNN, LightNN, ResNet, ViT
from lit_modules.nets.embedder import Embedder
from lit_modules.objectives import RKD, EmbeddingMatch, Hinton, Objective, SimilarityKL, Untrained
from tests.grids import mostly_slow
from tests.training import SHAPE, assert_agree, assert_same, digits, fit, net, on, outcome, trainer, weights

METHODS: dict[str, Any] = {
    "match": EmbeddingMatch, "batch": SimilarityKL, "queue": lambda: SimilarityKL(queue=50), "rkd": RKD,
    "untrained": Untrained,
}  # fmt: skip
TAGS = [f"{name}/train/loss" for name in METHODS if name != "untrained"]


def embedder(make: type[nn.Module] = LightNN, seed: int = 0, **options: Any) -> Embedder:
    return with_seed(seed, lambda: Embedder(net(make, seed), SHAPE, **options))


def data(**options: Any) -> Digits:
    return digits(**{"task": "embedding", "validation_size": 20} | options)


def module(*names: str, objectives: dict[str, Objective] | None = None) -> Distillation:
    methods = objectives or {name: METHODS[name]() for name in names or METHODS}
    students = {name: (embedder(), objective) for name, objective in methods.items()}
    return Distillation(
        embedder(DeepNN, 1), students, SHAPE, task=Embedding(), samples=data().sizes["train"], labelled=False
    )


@pytest.mark.parametrize("devices", mostly_slow([2, 3], 2))
def test_any_number_of_processes_gives_the_same(devices: int, tmp_path: Path) -> None:
    one, several = (outcome(module(), data(), tmp_path, TAGS, n, precision="64-true") for n in (1, devices))
    assert_agree(one, several)


def test_mixed_and_augmented_images_are_the_same_view_for_both_nets(tmp_path: Path) -> None:
    """On any number of processes; a student that is its teacher has nothing to learn from such a view."""
    views = {"mixup": 0.8, "augment": True}
    one, two = (outcome(module(), data(**views), tmp_path, TAGS, n, precision="64-true") for n in (1, 2))
    assert_agree(one, two)
    students = {"same": (embedder(seed=1), EmbeddingMatch("mse"))}
    same = Distillation(embedder(seed=1), students, SHAPE, task=Embedding(), labelled=False)
    losses, _ = outcome(same, data(**views), tmp_path, ["same/train/loss"], max_epochs=1)
    assert losses == [0.0] * 3


def test_exact_gives_the_same_bits(tmp_path: Path) -> None:
    one, two = (outcome(module(), data(), tmp_path, TAGS, **on(f"ddp {n} exact 4")) for n in (1, 2))
    assert one[0] == two[0]
    assert_same(one[1], two[1])


def test_alone_is_as_in_company() -> None:
    together = weights(fit(module(), data()))
    for name in ("match", "queue"):
        alone = weights(fit(module(name), data()))
        assert_same(alone, {key: together[key] for key in alone})


def test_the_untrained_student_is_as_it_began_and_no_label_is_seen() -> None:
    begun = weights(module())
    ended = weights(fit(module(), data(), max_epochs=1))
    own = {key: value for key, value in begun.items() if key.startswith("students.untrained.")}
    assert_same(own, {key: ended[key] for key in own})

    other = data()
    train: Any = other.split("train")
    train.labels.copy_(9 - train.labels)
    assert_same(ended, weights(fit(module(), other, max_epochs=1)))


@pytest.mark.parametrize("devices", [1, 2])
def test_scores_are_those_of_the_whole_set(devices: int) -> None:
    students, samples = module(), data()
    (scores,) = trainer(devices).test(students, samples, verbose=False)
    inputs, _ = samples.samples("test", torch.arange(samples.sizes["test"]))
    with torch.no_grad():
        s, t = students.students["match"].net.eval()(inputs), students.teacher(inputs)
    assert scores["match/test/neighbours"] == pytest.approx(float(shared_neighbours(s, t).mean()), abs=1e-12)


@pytest.mark.parametrize("make", [LightNN, ViT, ResNet])
def test_an_embedding_is_what_the_classifier_reads(make: type[nn.Module]) -> None:
    whole = net(make).eval()
    inputs, read = torch.randn(3, *SHAPE), []
    last = [layer for layer in whole.modules() if isinstance(layer, nn.Linear)][-1]
    first = whole.classifier[0] if isinstance(whole, LightNN) else last
    first.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    logits = whole(inputs)
    found = Embedder(whole, SHAPE).eval()
    assert torch.equal(found(inputs), read[0].flatten(1))
    assert torch.equal(whole(inputs), logits)  # whoever has the classifier keeps it
    assert found.width == read[0].flatten(1).shape[1]
    assert all("classifier" not in name and "head" not in name for name, _ in found.named_parameters())
    assert Embedder(whole, SHAPE, width=7)(inputs).shape == (3, 7)


def test_a_plain_modules_embedding_is_the_input_of_its_last_linear_layer() -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10))
    inputs = torch.randn(3, *SHAPE)
    assert torch.equal(Embedder(plain, SHAPE)(inputs), plain[:3](inputs))
    with pytest.raises(BadInput, match="net Conv2d: expected a net with a linear layer"):
        Embedder(nn.Conv2d(1, 1, 1), SHAPE)


def test_a_method_of_classes_is_refused() -> None:
    line = "variants.kd Hinton: expected a method that compares embeddings; it learns from classes"
    with pytest.raises(BadInput, match=line):
        module(objectives={"kd": Hinton()})
