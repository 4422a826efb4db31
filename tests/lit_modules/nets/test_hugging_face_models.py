"""Models of transformers, made here: their own logits, any number of classes, a study that learns from them."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apprentice.keyed import with_seed
from datamodules import Digits, Text
from experiments import gpt, kd
from harness.runs.nets import load_net
from lit_modules import nets
from lit_modules.distillation import Distillation
from lit_modules.language_model import LitLanguageModel
from lit_modules.nets import HuggingFace, HuggingFaceLM
from lit_modules.nets.hugging_face import read_normalization
from lit_modules.objectives import Hinton
from strategies import DDP, FSDP
from tests import with_transformers
from tests.commands import bad_input, results
from tests.language_parts import WORDS, save_tokenizer
from tests.training import assert_same, digits, fit, weights

KD = [
    "--data", "Digits",
    "--only", "kd", "--seeds", "1", "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2",
]  # fmt: skip
pytestmark = pytest.mark.extras("transformers")


class Words(Digits):
    class_names = tuple(f"digit {number}" for number in range(10))


@with_transformers.in_fork
def test_classifiers_from_a_folder(folder: Path) -> None:
    import transformers

    warnings.simplefilter("ignore")  # from what transformers imports
    images = torch.randn(3, 1, 8, 8)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    vit = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=10, **sizes)
    resnet = transformers.ResNetConfig(
        num_channels=1, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=10
    )
    for name, config in {"vit": vit, "resnet": resnet}.items():
        theirs = transformers.AutoModelForImageClassification.from_config(config).eval()
        theirs.save_pretrained(folder / name)
        ours = HuggingFace(str(folder / name), (1, 8, 8), 10, pretrained=True).eval()
        assert torch.equal(ours(images), theirs(images).logits)
        other = HuggingFace(str(folder / name), (1, 8, 8), 3, pretrained=True).eval()
        assert other(images).shape == (3, 3)
        body = {key: value for key, value in theirs.state_dict().items() if not key.startswith("classifier")}
        assert all(torch.equal(other.model.state_dict()[key], value) for key, value in body.items())
    labels = [f"digit {number}" for number in range(10)][::-1]
    theirs = transformers.AutoModelForImageClassification.from_pretrained(folder / "vit").eval()
    theirs.config.id2label, theirs.config.label2id = dict(enumerate(labels)), {x: i for i, x in enumerate(labels)}
    theirs.save_pretrained(folder / "named")
    known = {
        count: HuggingFace(str(folder / "named"), (1, 8, 8), count, pretrained=True).class_names for count in (10, 3)
    }
    assert known == {10: tuple(labels), 3: None}
    assert HuggingFace(str(folder / "named"), (1, 8, 8)).class_names is None
    assert ours.class_names == ()
    assert nets.classes_of(theirs) == tuple(labels)
    preprocessor = {"image_processor_type": "ViTImageProcessor", "image_mean": [0.3], "image_std": [0.2]}
    (folder / "vit" / "preprocessor_config.json").write_text(str(preprocessor).replace("'", '"'))
    vit = str(folder / "vit")
    assert HuggingFace(vit, (1, 8, 8), pretrained=True).expects == {"mean": (0.3,), "std": (0.2,)}
    assert HuggingFace(vit, (3, 16, 16), 7)(torch.zeros(2, 3, 16, 16)).shape == (2, 7)
    assert bad_input(HuggingFace, vit, (1, 16, 16), pretrained=True).startswith(
        "pretrained True: expected weights that"
    )
    assert bad_input(HuggingFace, str(folder / "none")).startswith(f"name {folder / 'none'}: expected an image classif")
    flags = [*KD, "--teacher", "HuggingFace", "--teacher.name", vit, "--teacher.pretrained", "true"]
    flags += ["--data.mean", "[0.3]", "--data.std", "[0.2]", "--student", "HuggingFace", "--student.name"]
    named = [flag.replace(vit, str(folder / "named")) for flag in flags]
    (folder / "named" / "preprocessor_config.json").write_text(str(preprocessor).replace("'", '"'))
    words = ["--data", f"{__name__}.Words", "--optimizer.lr", "1e-30"]
    kd.main([*named, str(folder / "resnet"), *words, "--out", str(folder / "words")])
    found, expected = load_net(folder / "words" / "seed0" / "teacher")(images), theirs(images).logits.flip(1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # a matrix product may depend on the order of rows
    kd.main([*flags, str(folder / "resnet"), "--out", str(folder / "run")])
    assert set(results(folder / "run")["students"]) == {"kd"}
    for name in ("teacher", "kd"):
        assert load_net(folder / "run" / "seed0" / name)(images).shape == (3, 10)


@with_transformers.in_fork
def test_language_models_from_a_folder(folder: Path) -> None:
    import transformers

    warnings.simplefilter("ignore")
    name = str(folder / "lm")
    tokenizer = save_tokenizer(folder / "lm")
    config = transformers.GPT2Config(vocab_size=300, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(name)

    (folder / "a.txt").write_text(WORDS * 60 + "ü\n")
    data = Text(folder / "a.txt", 8, tokenizer=name, validation_size=0)
    assert data.num_classes == len(tokenizer) > 256
    train, test = data.split("train"), data.split("test")
    text: Any = train
    whole = WORDS * 60 + "ü\n"
    assert data.vocabulary.decode(text.text) == whole[: len(whole) * 9 // 10]
    count = int((test.labels != -100).sum()) + 1
    assert data.tokens_per_character["test"] == pytest.approx(count / (len(whole) - len(whole) * 9 // 10))

    tokens = test.inputs[:2]
    ours = HuggingFaceLM(name, data.num_classes, 8, pretrained=True).eval()
    assert torch.equal(ours(tokens), theirs(tokens.long()).logits[..., : data.num_classes])
    assert bad_input(HuggingFaceLM, name, 301, 8) == f"name {name}: expected a model for 301 tokens; it has 300"
    assert bad_input(HuggingFaceLM, name, 300, 33).endswith("a model for 33 tokens of a text; it has 32")
    assert bad_input(Text(folder / "a.txt", tokenizer=str(folder / "no")).setup).startswith("data.tokenizer ")

    chars = ["--data", "Text", "--data.path", str(folder / "a.txt"), "--data.block_size", "8", "--teacher", "GPT"]
    student = ["--student", "HuggingFaceLM", "--student.name", name, "--student.pretrained", "true"]
    with pytest.raises(SystemExit):
        kd.main([*KD, *chars, *student, "--out", str(folder / "chars")])
    assert bad_input(Text, folder / "a.txt", 8, "bytes", tokenizer=name).startswith(
        "data.vocabulary bytes: not allowed with"
    )

    flags = ["--data", "Text", "--data.path", str(folder / "a.txt"), "--data.block_size", "8", "--student", "GPT"]
    flags += ["--student.num_layers", "1", "--student.num_heads", "1", "--student.embed_dim", "8"]
    teacher = ["--teacher", "HuggingFaceLM", "--teacher.name", name, "--teacher.pretrained", "true"]
    kd.main([*KD, *flags, *teacher, "--out", str(folder / "run")])
    assert results(folder / "run")["teacher"]["nets"] == 1
    teacher = load_net(folder / "run" / "seed0" / "teacher").model.state_dict()
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in teacher.items())
    student = results(folder / "run")["students"]["kd"]
    assert student["test_bpc"][0] > 0
    assert load_net(folder / "run" / "seed0" / "kd")(tokens).shape == (2, 8, data.num_classes)
    size = ["--net.num_layers", "1", "--net.num_heads", "1", "--net.embed_dim", "8", "--data.tokenizer", name]
    gpt.main([*flags[2:6], *size, "--seeds", "1", "--trainer.max_steps", "2", "--out", str(folder / "gpt")])
    gpt.main(["--sample", "the", "--run", str(folder / "gpt")])


@pytest.mark.parametrize(
    ("more", "mean", "std"),
    [({}, (0.3,), (0.2,)), ({"do_normalize": False}, (0.0,), (1.0,)), ({"include_top": True}, (0.3,), (0.2**2,))],
)
def test_images_are_expected_as_the_processor_makes_them(more: dict, mean: tuple, std: tuple) -> None:
    found = {"image_mean": [0.3], "image_std": [0.2], **more}
    library = SimpleNamespace(ImageProcessingMixin=SimpleNamespace(get_image_processor_dict=lambda _: (found, {})))
    assert read_normalization(library, "FOLDER", 1) == {"mean": mean, "std": std}


@pytest.mark.slow
@with_transformers.in_fork
def test_ranks_without_rows(folder: Path) -> None:
    """A batch of two rows on three ranks trains and evaluates as on one."""
    import transformers

    warnings.simplefilter("ignore")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    images = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10}
    (folder / "a.txt").write_text(WORDS * 10)

    def texts() -> Text:
        return Text(folder / "a.txt", 8, batch_size=197, validation_size=0)

    def gpt2() -> Any:
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=2, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0
        )
        return LitLanguageModel(transformers.GPT2LMHeadModel(config))

    def llama() -> Any:
        return LitLanguageModel(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes)))

    def vit() -> Any:
        config = transformers.ViTConfig(**sizes, **images, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        teacher, student = (transformers.ViTForImageClassification(config) for _ in range(2))
        return Distillation(teacher, {"kd": (student, Hinton())}, (1, 8, 8), teacher_cache_mb=0)

    assert texts().sizes["train"] % 197 == digits().sizes["train"] % 33 == 2
    cases = [(gpt2, texts, DDP), (llama, texts, FSDP), (vit, lambda: digits(batch_size=33), FSDP)]
    for make, data, strategy in cases:
        ended = []
        for devices, options in ((1, {}), (3, {"strategy": strategy(timeout=60)})):
            module = with_seed(0, make)
            ended.append(weights(fit(module, data(), devices, precision="64-true", max_epochs=1, **options)))
        assert_same(*ended, atol=1e-6)  # norms of Llama compute in float32
