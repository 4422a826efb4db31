"""Linear probing: only the head of a net is trained, and all else keeps its bits."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from experiments import kd
from harness.runs.quiet import quiet
from lit_modules.classifier import LitClassifier
from lit_modules.nets import GPT, LightNN, ResNet, Torchvision, ViT
from lit_modules.nets.layers import heads
from tests.commands import refused
from tests.training import SHAPE, assert_same, digits, fit, trainer, weights

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
    changed = {
        key.rpartition(".")[0] for key, value in weights(module.net).items() if not torch.equal(value, before[key])
    }
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


KD = ["--data.train_size", "60", "--data.test_size", "20", "--only", "kd", "--seeds", "1", "--trainer.max_epochs", "1"]


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


def test_a_probe_without_trained_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*KD, "--teacher_head_only", "true"]
    said = "--teacher_head_only true: expected --teacher_ckpt FILE and --teacher_epochs N beside it"
    torch.save(LightNN(SHAPE).state_dict(), tmp_path / "a.pt")
    loaded = ["--teacher", "LightNN", "--teacher_ckpt", str(tmp_path / "a.pt")]
    refused(kd.main, [*flags, *loaded], said, "", tmp_path, capsys)
