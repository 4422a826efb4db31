"""Nets that begin with weights of others, of which the head alone may be trained; models that give more than logits."""

import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision import models

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from experiments import kd
from harness.runs.quiet import quiet
from lit_modules.classifier import LitClassifier
from lit_modules.nets import GPT, LightNN, ResNet, Timm, Torchvision, ViT, unwrap_logits
from lit_modules.nets import run as run_net
from lit_modules.nets.layers import heads
from lit_modules.nets.specs import rebuild, to_plain
from lit_modules.nets.timm import _class_names
from lit_modules.nets.weights import load_weights
from tests.commands import Refusal
from tests.processes import Run
from tests.training import SHAPE, assert_same, digits, fit, trainer, weights


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """Torchvision's model of a thousand classes, and the file of its weights."""
    model = with_seed(3, lambda: models.resnet18(weights=None)).eval()
    path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    torch.save(model.state_dict(), path)
    return model, path


def test_weights_of_a_file_give_torchvisions_own_logits(resnet: tuple[nn.Module, Path]) -> None:
    model, path = resnet
    net = Torchvision("resnet18", (3, 64, 64), num_classes=1000, weights=str(path)).eval()
    image = torch.linspace(-2, 2, 3 * 64 * 64).reshape(1, 3, 64, 64)
    torch.testing.assert_close(net(image), model(image), rtol=0, atol=1e-6)
    assert net.class_names == ()  # a file does not say


def test_a_head_of_another_size_stays_new(resnet: tuple[nn.Module, Path]) -> None:
    model, path = resnet
    net = with_seed(0, lambda: Torchvision("resnet18", num_classes=10, weights=str(path)))
    fresh = with_seed(0, lambda: Torchvision("resnet18", num_classes=10))
    assert torch.equal(net.model.fc.weight, fresh.model.fc.weight)
    assert (net.class_names, fresh.class_names) == (None, None)
    assert torch.equal(net.model.layer4[1].conv2.weight, model.layer4[1].conv2.weight)
    assert to_plain(net)["init_args"]["weights"] is None  # a file of its own weights stands in for them


def test_weights_that_are_not_there_are_refused(resnet: tuple[nn.Module, Path], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^weights nope: expected IMAGENET1K_V1, DEFAULT, or a file of weights$"):
        Torchvision("resnet18", weights="nope")
    with pytest.raises(BadInput, match=r"weights that fit ResNet; missing: "):
        Torchvision("resnet34", weights=str(resnet[1]))
    (tmp_path / "x.pth").write_text("no weights")
    with pytest.raises(BadInput, match=r"^weights .*x\.pth: expected a file of weights; "):
        Torchvision("resnet18", weights=str(tmp_path / "x.pth"))


def test_named_weights_bring_mean_and_classes(resnet: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    enum = models.get_model_weights("resnet18")
    monkeypatch.setattr(enum, "get_state_dict", lambda self, **_: resnet[0].state_dict())
    net = Torchvision("resnet18", weights="DEFAULT")
    assert net.expects == {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    assert net.class_names is None
    whole = Torchvision("resnet18", num_classes=1000, weights="DEFAULT")
    assert whole.class_names is not None
    assert whole.class_names[:2] == ("tench", "goldfish")

    def offline(self: Any, **_: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr(enum, "get_state_dict", offline)
    with pytest.raises(BadInput, match=r"^weights DEFAULT: expected weights that can be downloaded \(no network\)$"):
        Torchvision("resnet18", weights="DEFAULT")


@pytest.mark.parametrize(
    ("name", "size"), [("googlenet", 64), pytest.param("inception_v3", 96, marks=pytest.mark.slow)]
)
def test_weights_bring_the_normalisation_that_torchvision_gives_them(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    net = models.get_model(name, weights=None, init_weights=False)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):  # whose usual first weights give nearly the same logits for any image
            with_seed(3, partial(nn.init.kaiming_normal_, module.weight))
    state = net.state_dict()
    enum = models.get_model_weights(name)
    monkeypatch.setattr(enum, "get_state_dict", lambda self, **_: state)
    file = str(tmp_path / "w.pth")
    torch.save(state, file)
    theirs = models.get_model(name, weights="DEFAULT").eval()
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    files = {weights: Torchvision(name, (3, size, size), 1000, weights=weights) for weights in ("DEFAULT", file)}
    for ours in files.values():
        assert torch.equal(ours.eval()(images), theirs(images))
    again = rebuild(to_plain(files["DEFAULT"]))  # without the weights, which a file of its own has
    again.load_state_dict(files["DEFAULT"].state_dict())
    assert torch.equal(again.eval()(images), theirs(images))
    chosen = Torchvision(name, (3, size, size), 1000, weights="DEFAULT", transform_input=False).eval()
    assert not torch.equal(chosen(images), theirs(images))


def test_only_some_models_normalise_their_input() -> None:
    with pytest.raises(BadInput, match=r"^transform_input True: expected googlenet or inception_v3, not resnet18$"):
        Torchvision("resnet18", transform_input=True)


def test_part_of_a_checkpoint_loads_and_the_rest_is_named(tmp_path: Path) -> None:
    other = with_seed(1, lambda: LightNN((1, 8, 8), num_classes=7))
    torch.save({"epoch": 3, "model": {f"module.{k}": v for k, v in other.state_dict().items()}}, tmp_path / "a.pt")
    net = with_seed(0, lambda: LightNN((1, 8, 8)))
    before = net.classifier[3].weight.clone()
    told = load_weights(net, str(tmp_path / "a.pt"), "teacher_ckpt", partly=True)
    assert told == [
        "not loaded: classifier.3.bias, classifier.3.weight", "not in it: classifier.3.bias, classifier.3.weight",
    ]  # fmt: skip
    assert torch.equal(net.features[0].weight, other.features[0].weight)
    assert torch.equal(net.classifier[3].weight, before)
    with pytest.raises(BadInput, match="of another shape: classifier"):
        load_weights(net, str(tmp_path / "a.pt"), "teacher_ckpt")
    torch.save({"a.b": torch.ones(1), "a.c": torch.ones(1)}, tmp_path / "b.pt")
    with pytest.raises(BadInput, match="weights of which some fit LightNN; none does"):
        load_weights(net, str(tmp_path / "b.pt"), "teacher_ckpt", partly=True)


KD = [
    "--data", "Digits",
    "--data.train_size", "60", "--data.test_size", "20", "--only", "kd", "--seeds", "1", "--trainer.max_epochs", "1",
]  # fmt: skip


def test_a_teacher_with_a_new_head_is_tuned_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = with_seed(1, lambda: LightNN((1, 8, 8), num_classes=7))
    torch.save(other.state_dict(), tmp_path / "a.pt")
    out, loaded = tmp_path / "run", ["--teacher", "LightNN", "--teacher_ckpt", str(tmp_path / "a.pt")]
    with pytest.raises(SystemExit):
        kd.main([*KD, *loaded, "--teacher_ckpt_partial", "true", "--out", str(out)])
    line = "error: --teacher_ckpt_partial true: expected --teacher_epochs N"
    assert line in capsys.readouterr().err
    kd.main([*KD, *loaded, "--teacher_ckpt_partial", "true", "--teacher_epochs", "2", "--out", str(out)])
    assert "not loaded: classifier.3.bias, classifier.3.weight" in "".join(capsys.readouterr())
    found = torch.load(out / "seed0" / "teacher" / "weights.pt", weights_only=True)
    moved = (found["features.0.weight"] - other.features[0].weight).abs().max()
    assert 0 < moved < 0.1


def test_a_run_with_pretrained_weights_is_rebuilt_from_its_own(resnet: tuple[nn.Module, Path], tmp_path: Path) -> None:
    weights = str(shutil.copy(resnet[1], tmp_path / "copy.pth"))
    chosen = ["--teacher", "Torchvision", "--teacher.weights", weights]
    kd.main([*KD, *chosen, "--data.train_size", "20", "--data.test_size", "10", "--out", str(tmp_path / "run")])
    assert "weights: null" in (tmp_path / "run" / "seed0" / "teacher" / "net.yaml").read_text()


class Many(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layers = kind, nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> Any:
        logits = self.layers(images)
        kinds = {"tuple": (logits, 3), "dict": {"logits": logits}, "object": SimpleNamespace(logits=logits)}
        return kinds[self.kind]


@pytest.mark.slow
@pytest.mark.extras("timm")
def test_a_model_of_timm_by_name(tmp_path: Path) -> None:
    run = Run(_timm, tmp_path, log=tmp_path / "log")
    assert run.wait() == 0, run.output


def _timm(folder: Path) -> None:
    import timm

    net = with_seed(0, lambda: Timm("resnet10t", (3, 32, 32), 7)).eval()
    theirs = with_seed(0, lambda: timm.create_model("resnet10t", num_classes=7)).eval()
    image = torch.rand(2, 3, 32, 32)
    assert torch.equal(net(image), theirs(image))
    found = run_net(net, image, ["stage1", "default", "pooled"]).features
    shapes = {name: tuple(x.shape) for name, x in found.items()}
    assert shapes == {"stage1": (2, 64, 16, 16), "default": (2, 512, 1, 1), "pooled": (2, 512)}
    theirs.reset_classifier(9)
    torch.save(theirs.state_dict(), folder / "w.pth")
    again = Timm("resnet10t", (3, 32, 32), 7, weights=str(folder / "w.pth"))
    assert torch.equal(again.model.conv1[0].weight, theirs.conv1[0].weight)
    assert again.class_names is None
    names = _class_names(timm.data, timm.create_model("resnet10t"))
    assert (names[0], len(names)) == ("n01440764, tench, Tinca tinca", 1000)
    vit = Timm("vit_tiny_patch16_224", (1, 32, 32), 4)
    assert vit(torch.rand(2, 1, 32, 32)).shape == (2, 4)
    with pytest.raises(BadInput, match=r"^name resnet10: expected a model of timm, as .*resnet10t"):
        Timm("resnet10")
    kd.main([*KD, "--student", "Timm", "--student.name", "resnet10t", "--out", str(folder / "run")])


@pytest.mark.parametrize("kind", ["tuple", "dict", "object"])
def test_logits_inside_of_other_outputs_are_found(kind: str) -> None:
    net = Many(kind)
    module = fit(LitClassifier(unwrap_logits(unwrap_logits(net))), digits(), max_epochs=1)
    assert isinstance(module(torch.zeros(2, 1, 8, 8)), torch.Tensor)
    assert len(net._forward_hooks) == 1
    assert list(net.state_dict()) == ["layers.1.weight", "layers.1.bias"]


NETS = {
    "batch norm": (partial(ResNet, 8), {"head"}),
    "dropout": (LightNN, {"classifier.3"}),
    "two heads": (partial(ViT, embed_dim=8, num_layers=1, num_heads=2, distillation_token=True), {"head", "head_dist"}),
}


def probe(name: str = "batch norm") -> LitClassifier:
    """A module in float64 whose BatchNorm has statistics."""
    net = with_seed(1, lambda: NETS[name][0](input_shape=SHAPE)).double()
    if name == "batch norm":
        with torch.no_grad():
            net(torch.randn(64, *SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    return LitClassifier(net, head_only=True)


@pytest.mark.parametrize("name", NETS)
def test_all_but_the_head_keeps_its_bits(name: str) -> None:
    module = probe(name)
    before = weights(module.net)
    fit(module, digits(), precision="64-true")
    changed = {key.rpartition(".")[0] for key, x in weights(module.net).items() if not torch.equal(x, before[key])}
    assert changed == NETS[name][1]
    assert not any(part.training for part in module.net.modules())


def test_it_is_a_regression_on_fixed_features() -> None:
    data, net, head = digits(), probe().net.eval(), nn.Linear(64, 10).double()
    head.load_state_dict(net.head.state_dict())
    net.head, optimizer = nn.Identity(), torch.optim.Adam(head.parameters(), lr=1e-3)
    for epoch in range(2):
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            with torch.no_grad():
                features = net(data.normalize(batch.inputs, torch.float64))
            optimizer.zero_grad()
            F.cross_entropy(head(features), batch.labels).backward()
            optimizer.step()
    found = fit(probe(), digits(), precision="64-true")
    assert_same(weights(found.net.head), weights(head), atol=1e-12)


def test_two_processes_train_the_head_of_one() -> None:
    one, two = (fit(probe(), digits(), devices, precision="64-true") for devices in (1, 2))
    assert_same(weights(one), weights(two), atol=1e-12)


def test_a_checkpoint_resumes_to_the_same_bits_and_loads_as_a_probe(tmp_path: Path) -> None:
    path, whole = str(tmp_path / "a.ckpt"), fit(probe(), digits(), precision="64-true")
    with quiet():
        half = trainer(max_epochs=1, precision="64-true")
        half.fit(probe(), digits())
        half.save_checkpoint(path)
        again = probe()
        trainer(precision="64-true").fit(again, digits(), ckpt_path=path)
    assert_same(weights(again), weights(whole))
    loaded = LitClassifier.load_from_checkpoint(path).net
    assert {name for name, p in loaded.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}


def test_nets_without_a_head_of_their_own_are_refused() -> None:
    for net in (nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), Torchvision("squeezenet1_1", (3, 64, 64))):
        with pytest.raises(BadInput, match=r"^net \w+: expected a net that names its classifier, by its attribute"):
            heads(net)
    with pytest.raises(BadInput, match=r"^net GPT: expected a net whose head has weights of its own; embedding"):
        heads(GPT(10, 8, embed_dim=8, num_layers=1, num_heads=1))
    assert heads(Torchvision("vgg11", (3, 32, 32), 7))[0].out_features == 7


def test_a_teacher_with_a_new_head_is_probed_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = with_seed(1, lambda: LightNN(SHAPE, num_classes=7))
    torch.save(other.state_dict(), tmp_path / "a.pt")
    flags = [*KD, "--teacher", "LightNN", "--teacher_ckpt", str(tmp_path / "a.pt"), "--teacher_ckpt_partial", "true"]
    flags += ["--teacher_epochs", "3", "--teacher_head_only", "true", "--checkpoint_every", "0.001"]
    kd.main([*flags, "--out", str(tmp_path / "whole")])
    with monkeypatch.context() as patched:
        patched.setattr(LitClassifier, "on_validation_epoch_start", stop_in_second_epoch)
        with pytest.raises(RuntimeError, match="power"):
            kd.main([*flags, "--out", str(tmp_path / "cut")])
    kd.main(["--out", str(tmp_path / "cut"), "--resume", "true"])
    whole, cut = (torch.load(tmp_path / run / "seed0" / "teacher" / "weights.pt") for run in ("whole", "cut"))
    assert_same(whole, cut)
    kept = {key: value for key, value in other.state_dict().items() if not key.startswith("classifier.3.")}
    assert_same({key: whole[key] for key in kept}, kept)
    assert "teacher_head_only True" in (tmp_path / "whole" / "results.md").read_text()
    assert "the run grew" not in (tmp_path / "whole" / "results.md").read_text()


def stop_in_second_epoch(module: LitClassifier) -> None:
    if module.trainer.current_epoch == 1:
        raise RuntimeError("no power")


def test_a_probe_without_epochs_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    torch.save(LightNN(SHAPE).state_dict(), tmp_path / "a.pt")
    loaded = ["--teacher", "LightNN", "--teacher_ckpt", tmp_path / "a.pt"]
    line = refusal(kd.main, *KD, "--teacher_head_only", "true", *loaded)
    assert line.startswith("--teacher_head_only true: expected --teacher_ckpt FILE and --teacher_epochs N beside it")
