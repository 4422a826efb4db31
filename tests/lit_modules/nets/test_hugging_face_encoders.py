"""Encoders of transformers, made here: the library's own embeddings and tokens, as teachers and as students."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from apprentice.keyed import with_seed
from experiments import kd
from harness.runs.nets import load_net
from lit_modules.distillation import Distillation
from lit_modules.embedding.task import Embedding
from lit_modules.nets import HuggingFace, run
from lit_modules.nets.embedder import Embedder
from lit_modules.nets.tokens import TokenGrid, as_maps
from lit_modules.nets.weights import load_weights
from lit_modules.objectives import EmbeddingMatch, SimilarityKL, TokenMatch, TokenSimilarity
from tests import with_transformers
from tests.commands import bad_input, results
from tests.training import SHAPE, assert_agree, assert_same, digits, outcome

pytestmark = pytest.mark.extras("transformers")
IMAGES = {"image_size": 8, "patch_size": 2, "num_channels": 1}
NARROW = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES = NARROW | IMAGES | {"intermediate_size": 32}
MAPS: dict[str, Any] = {"num_channels": 1, "hidden_sizes": [4, 4, 8, 16], "depths": [1, 1, 1, 1]}
# By name: class of the configuration, its values, and the tokens before the patches; None for maps.
KINDS: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "vit": ("ViTConfig", SIZES, 1),
    "dinov2": ("Dinov2Config", NARROW | IMAGES | {"mlp_ratio": 2}, 1),
    "registers": ("Dinov2WithRegistersConfig", NARROW | IMAGES | {"mlp_ratio": 2, "num_register_tokens": 3}, 4),
    "dinov3": ("DINOv3ViTConfig", SIZES | {"num_register_tokens": 3}, 4),
    "mae": ("ViTMAEConfig", SIZES, 1),
    "clip": ("CLIPVisionConfig", SIZES, 1),
    "ijepa": ("IJepaConfig", SIZES, 0),
    "convnext": ("ConvNextConfig", MAPS, None),
    "dinov3-convnext": ("DINOv3ConvNextConfig", MAPS, None),
}
KD = [
    "--data", "Digits", "--data.task", "embedding", "--data.train_size", "100", "--data.test_size", "50",
    "--seeds", "1", "--trainer.max_epochs", "1",
]  # fmt: skip


def save(folder: Path, kind: str, **changes: Any) -> Any:
    """Save a random model, larger weights than new ones have, and return it."""
    import transformers

    warnings.simplefilter("ignore")  # from what transformers imports
    config_class, values, _ = KINDS[kind]
    config = getattr(transformers, config_class)(**values | changes)
    model = with_seed(0, lambda: transformers.AutoModel.from_config(config)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(
                torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) / max(p.shape[-1], 4) ** 0.5
            )
    model.save_pretrained(folder / kind)
    return model.double()


def side(kind: str) -> int:
    return 8 if KINDS[kind][2] is not None else 64


@pytest.mark.parametrize("kind", KINDS)
@with_transformers.in_fork
def test_embeddings_and_tokens_are_the_librarys(kind: str, folder: Path) -> None:
    theirs, before = save(folder, kind), KINDS[kind][2]
    images = with_seed(1, lambda: torch.randn(3, 1, side(kind), side(kind), dtype=torch.float64))
    if kind == "mae":  # whose patches the library shuffles
        theirs.embeddings.config.mask_ratio = 0.0
        output = theirs(images, noise=torch.arange(16.0).expand(3, -1))
    else:
        output = theirs(images)
    last, pooled = output.last_hidden_state, getattr(output, "pooler_output", None)
    embeddings = pooled.flatten(1) if pooled is not None else last[:, 0] if before else last.mean(1)

    shape = (1, side(kind), side(kind))
    ours = HuggingFace(str(folder / kind), shape, pretrained=True, embeds=True).double().eval()
    held = Embedder(ours, shape).eval()
    given = run(held, images, ["default"])
    for found in (ours(images), given.logits):
        torch.testing.assert_close(found, embeddings, rtol=0, atol=1e-10)
    maps = as_maps(given.features["default"], held.token_grid)
    if before is None:
        assert ours.token_grid is None
        assert maps.shape == (3, 16, 2, 2)
    else:
        assert ours.token_grid == TokenGrid(4, 4, before)
        patches = last[:, before:].mT.unflatten(2, (4, 4))
        torch.testing.assert_close(maps, patches, rtol=0, atol=1e-10)
        mean = HuggingFace(str(folder / kind), SHAPE, pretrained=True, embeds=True, pool="mean").double().eval()
        torch.testing.assert_close(mean(images), last[:, before:].mean(1), rtol=0, atol=1e-10)


@with_transformers.in_fork
def test_the_image_tower_of_a_clip_and_images_of_another_size(folder: Path) -> None:
    import transformers

    warnings.simplefilter("ignore")
    text = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, **NARROW, "intermediate_size": 32}
    config = transformers.CLIPConfig(vision_config=SIZES, text_config=text)
    whole = with_seed(0, lambda: transformers.AutoModel.from_config(config)).eval()
    whole.save_pretrained(folder / "whole")
    images = torch.randn(2, 1, 12, 8)
    ours = HuggingFace(str(folder / "whole"), (1, 12, 8), pretrained=True, embeds=True).eval()
    theirs = whole.vision_model(images, interpolate_pos_encoding=True).pooler_output
    torch.testing.assert_close(ours(images), theirs)
    assert ours.token_grid == TokenGrid(6, 4, 1)


@with_transformers.in_fork
def test_weights_without_a_pooler_need_to_be_told_what_is_an_embedding(folder: Path) -> None:
    import transformers

    warnings.simplefilter("ignore")
    config = transformers.ViTConfig(**SIZES)
    whole = transformers.AutoModelForImageClassification.from_config(config).eval()
    whole.save_pretrained(folder / "vit")
    name, images = str(folder / "vit"), torch.randn(3, *SHAPE)
    assert bad_input(HuggingFace, name, SHAPE, pretrained=True, embeds=True).startswith("pool auto: expected cls or")
    ours = HuggingFace(name, SHAPE, pretrained=True, embeds=True, pool="cls").eval()
    assert torch.equal(ours(images), whole.vit(images).last_hidden_state[:, 0])
    assert torch.equal(ours(images), Embedder(HuggingFace(name, SHAPE, pretrained=True).eval(), SHAPE)(images))
    assert bad_input(HuggingFace, name, SHAPE, pool="mean").startswith("pool mean: not allowed for a classifier")
    file = str(folder / "classifier.pt")
    torch.save(HuggingFace(name, SHAPE, pretrained=True).state_dict(), file)
    held = Embedder(HuggingFace(name, SHAPE, embeds=True, pool="cls"), SHAPE).eval()
    assert load_weights(held, file, "teacher_ckpt") == []
    assert torch.equal(held(images), ours(images))
    save(folder, "convnext")
    options = {"embeds": True, "pool": "cls"}
    assert bad_input(HuggingFace, str(folder / "convnext"), (1, 32, 32), **options).startswith(
        "pool cls: expected mean"
    )


@pytest.mark.slow
@with_transformers.in_fork
def test_students_and_teachers_are_the_same_on_two_processes(folder: Path) -> None:
    for kind in ("dinov3", "mae"):
        save(folder, kind)

    def encoder(kind: str, pretrained: bool) -> Embedder:
        made = with_seed(0, lambda: HuggingFace(str(folder / kind), SHAPE, pretrained=pretrained, embeds=True))
        return Embedder(made, SHAPE)

    def module() -> Distillation:
        students = {
            "match": (encoder("mae", False), EmbeddingMatch()), "kl": (encoder("dinov3", False), SimilarityKL()),
            "token": (encoder("mae", False), TokenMatch()), "near": (encoder("dinov3", False), TokenSimilarity()),
        }  # fmt: skip
        return Distillation(encoder("dinov3", True), students, SHAPE, task=Embedding(), labelled=False)

    tags = [f"{name}/train/loss" for name in ("match", "kl", "token", "near")]
    one, two = (outcome(module(), digits(task="embedding"), folder, tags, n, precision="64-true") for n in (1, 2))
    assert_agree(one, two)


@with_transformers.in_fork
def test_a_pretrained_folder_teaches_and_students_are_rebuilt(folder: Path) -> None:
    theirs, images = save(folder, "dinov3").float(), torch.randn(3, *SHAPE)
    teacher = ["--teacher", "HuggingFace", "--teacher.name", str(folder / "dinov3"), "--teacher.pretrained", "true"]
    run_folder = folder / "run"
    kd.main([*KD, *teacher, "--only", "cosine", "tokens", "--student", "ViT", "--out", str(run_folder)])
    assert results(run_folder)["teacher"]["fit_seconds"] == [None]
    found = load_net(run_folder / "seed0" / "teacher")
    assert isinstance(found, Embedder)
    torch.testing.assert_close(found(images), theirs(images).pooler_output)

    save(folder, "mae")
    student = ["--teacher", "LightNN", "--student", "HuggingFace", "--student.name", str(folder / "mae")]
    kd.main([*KD, *student, "--only", "untrained", "--out", str(folder / "student")])
    begun = with_seed(0, lambda: HuggingFace(str(folder / "mae"), SHAPE, embeds=True))
    rebuilt = load_net(folder / "student" / "seed0" / "untrained")
    assert_same(Embedder(begun, SHAPE).state_dict(), rebuilt.state_dict())
