"""gpt.py --variants, end to end: nets side by side, what they cost, how a run grows, and what is refused."""

import math
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml

from datamodules import Text
from experiments import compare, gpt
from harness.runs.nets import load_net
from harness.runs.safepoints import SafePoints
from harness.studies.text.costs import cache_bytes, decoding_ms, training_flops
from lit_modules.nets import GPT
from tests.commands import Refusal, kill_at, lasting, nets, results, start
from tests.grids import mostly_slow
from tests.language import written
from tests.training import assert_same

SMALL = {"num_layers": "2", "embed_dim": "16", "dropout": "0.1"}
STEPS = ["--trainer.max_steps", "6", "--trainer.val_check_interval", "3", "--trainer.log_every_n_steps", "1"]
QUICK = [*STEPS, "--data.block_size", "16", "--model.warmup_steps", "3"]


def variant(name: str, **options: str) -> list[str]:
    flags = [f"--variants.{name}", "GPT"]
    for option, value in {**SMALL, "num_heads": "2", **options}.items():
        flags += [f"--variants.{name}.{option}", value]
    return flags


TWO, ONE = variant("two"), variant("one", num_heads="1", num_layers="3")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("variants")
    flags = ["--data.path", str(written(folder)), "--seeds", "2", "--out", str(folder / "run")]
    gpt.main([*QUICK, *TWO, *ONE, *flags])
    return folder / "run"


def of(finished: Path, *flags: str) -> list[str]:
    return [*QUICK, "--data.path", str(finished.parent / "text"), *flags]


def test_a_run_leaves_one_table(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = results(finished)
    assert (left["experiment"], list(left["students"]), "teacher" in left) == ("gpt", ["two", "one"], False)
    two, one = left["students"].values()
    differences = [a - b for a, b in zip(one["test_bpc"], two["test_bpc"], strict=True)]
    assert one["delta_vs_ce"]["mean"] == pytest.approx(sum(differences) / 2)
    assert one["delta_vs_ce"]["low"] < one["delta_vs_ce"]["mean"] < one["delta_vs_ce"]["high"]
    assert (one["baseline"], len(one["test_sample_bpc"])) == ("two", 2)
    data = Text(finished.parent / "text", 16)
    data.setup()
    for name, facts in left["students"].items():
        net = load_net(finished / "seed0" / name)
        losses = [
            torch.nn.functional.cross_entropy(net(batch.inputs).flatten(0, 1), batch.labels.flatten(), reduction="sum")
            for batch in data.test_dataloader()
        ]
        assert facts["test_loss"][0] == pytest.approx(sum(losses).item() / 49, rel=1e-5)
        assert facts["parameters"] == sum(p.numel() for p in net.parameters())
        assert facts["flops_token"] == training_flops(net, data)
        assert facts["tokens_per_second"] > 0
        capsys.readouterr()
        gpt.main(["--sample", "the ", "--run", str(finished / "seed0" / name)])
        assert capsys.readouterr().out.startswith("the ")
        assert (finished / "mean" / name).is_dir()
    page = (finished / "results.md").read_text()
    for line in ("| variant | parameters |", "Δ to two, bits", "MFLOPs a token", "Nets:\n\n- two: GPT(num_layers=2"):
        assert line in page
    assert "teacher" not in page


def test_a_net_is_the_same_alone(finished: Path, tmp_path: Path) -> None:
    gpt.main([*of(finished, *ONE), "--seeds", "1", "--out", str(tmp_path / "run")])
    assert_same(nets(tmp_path / "run"), nets(finished, "seed0/one"))


def test_a_run_grows_by_nets_and_seeds(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    gpt.main([*of(finished, *TWO), "--seeds", "1", "--out", str(run)])
    gpt.main(["--out", str(run), "--resume", "true", "--seeds", "2", *ONE])
    assert_same(nets(run), nets(finished))
    assert lasting(results(run), "commits") == lasting(results(finished), "commits")


@pytest.mark.parametrize("budget", ["parameters", "flops"])
def test_nets_of_equal_cost(budget: str, finished: Path, tmp_path: Path) -> None:
    run, key = tmp_path / "run", {"parameters": "parameters", "flops": "flops_token"}[budget]
    flags = ["--equal", budget, "--trainer.max_steps", "1", "--out", str(run)]
    wide = {"embed_dim": "32"}
    gpt.main([*of(finished, *variant("two", **wide)), *variant("deep", num_layers="6", num_heads="1", **wide), *flags])
    two, deep = results(run)["students"].values()
    assert abs(deep[key] / two[key] - 1) < 0.08
    width = results(run)["config"]["variants"]["deep"]["init_args"]["embed_dim"]
    assert width == load_net(run / "seed0" / "deep").init_args["embed_dim"] < 32
    assert yaml.safe_load((run / "config.yaml").read_text())["variants"]["deep"]["init_args"]["embed_dim"] == 32
    assert f"equal {budget}: embed_dim, at the given number of heads, by the budget of two: deep {width} (" in (
        run / "results.md"
    ).read_text().replace("\n", " ")


def test_what_a_token_costs(finished: Path) -> None:
    data = Text(finished.parent / "text", 16)
    data.setup()
    net = GPT(data.num_classes, 16, num_layers=2, num_heads=2, embed_dim=16)
    width, length = 16, 16
    products = 12 * 2 * width * width + data.num_classes * width  # of weights; of attention 2 T D a layer
    assert training_flops(net, data) == 6 * products + 2 * (2 + 5) * 2 * length * width
    assert decoding_ms(net, 40) > 0
    assert decoding_ms(torch.nn.Linear(2, 2), 40) is None
    if hasattr(net, "cache_bytes"):
        assert cache_bytes(net, 24) == 2 * 2 * width * 4


@pytest.mark.parametrize(("flags", "line"), [
    (["--equal", "flops"], "--equal flops: expected --variants.NAME CLASS beside it, a net to compare"),
    (["--tune", "3"], "--tune 3: expected --variants.NAME CLASS beside it, a net to compare"),
    (["--only", "a"], "--only a: expected --variants.NAME CLASS beside it, of which there is none"),
    (["--data", "Digits"], "--data Digits: expected Chat, "),
    (["--data", "datamodules.Digits"], "--data datamodules.Digits: expected texts, with a label for each token: "),
    ([*TWO, "--net.num_layers", "2"], "--net.num_layers 2: not allowed with --variants.two, which names"),
    ([*TWO, "--only", "three"], "--only three: expected names among two"),
    ([*TWO, "--decode_at", "0"], "--decode_at 0: expected numbers of tokens"),
    ([*TWO, "--equal", "bytes"], "--equal bytes: expected"),
    ([*TWO, "--search.model.lr", "[1]"], "--search.model.lr [1]: expected --tune N beside it"),
    ([*TWO, "--tune", "1"], "--tune 1: expected a number of settings of each method, at least 2"),
    ([*TWO, "--tune", "2"], "--trainer.val_check_interval 3: expected at most 2, the batches of an epoch"),
    (
        [*TWO, "--tune", "2", "--trainer.val_check_interval", "1.0"],
        "--trainer.max_epochs 6: expected a number of epochs, without --trainer.max_steps",
    ),
    ([*variant("five", num_heads="5")], "--variants.five.num_heads 5: expected a divisor of embed_dim, 16"),
    (
        [*TWO, "--variants.rnn", "torch.nn.Linear", "--equal", "flops"],
        "--variants.rnn.in_features (nothing): expected",
    ),
    (
        [*TWO, *variant("huge", num_heads="16", num_layers="60"), "--equal", "parameters"],
        "--equal parameters: expected variants that can have about",
    ),
])  # fmt: skip
def test_refused(flags: list[str], line: str, finished: Path, refusal: Refusal) -> None:
    assert refusal(gpt.main, *of(finished), *flags).startswith(line)


def test_one_net_learns_a_text(refusal: Refusal) -> None:
    expected = "expected Text, or --variants.NAME CLASS beside it, which takes any texts"
    assert refusal(gpt.main, "--data", "Chat") == f"--data Chat: {expected}"


@pytest.mark.parametrize("devices", mostly_slow(["1", "2"]))
def test_killed_and_resumed_it_ends_the_same(devices: str, finished: Path, tmp_path: Path) -> None:
    flags = [*of(finished, *TWO, *ONE), "--seeds", "2", "--checkpoint_every", "1e-9", "--trainer.devices", devices]
    killed, run = kill_at(SafePoints, "on_train_batch_start", 4, after=True), tmp_path / "run"
    start(run, *flags, before=killed, main=gpt.main).check(-signal.SIGKILL)
    start(run, *flags, "--resume", "true", main=gpt.main).check()
    assert_same(nets(run), nets(finished), atol=0.0 if devices == "1" else 1e-4)


@pytest.mark.slow
def test_two_processes_are_one(finished: Path, tmp_path: Path) -> None:
    for devices in ("1", "2"):
        flags = ["--trainer.devices", devices, "--trainer.precision", "64-true"]
        start(tmp_path / devices, *of(finished, *TWO, *ONE, *flags), main=gpt.main).check()
    assert_same(nets(tmp_path / "1"), nets(tmp_path / "2"), atol=1e-9)


@pytest.mark.slow
def test_nets_as_jobs_give_the_bits_of_one_process(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(gpt.__file__).parents[1]))
    run, jobs = tmp_path / "run", ["--launcher", "local", "--launcher.jobs", "2", "--launcher.students", "1"]
    gpt.main([*of(finished, *TWO, *ONE, *jobs), "--seeds", "2", "--out", str(run)])
    assert_same(nets(run), nets(finished))


@pytest.mark.slow
def test_runs_are_compared_and_pooled(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    gpt.main([*of(finished, *TWO, *ONE), "--seeds", "[2]", "--out", str(other)])
    gpt.main([*of(finished, *variant("two", num_heads="4")), "--seeds", "2", "--out", str(tmp_path / "four")])
    capsys.readouterr()
    compare.main([str(finished), str(tmp_path / "four"), "--out", str(tmp_path / "compared")])
    shown = capsys.readouterr().out
    assert "four/two" in shown
    assert "no student called" not in shown
    compare.main([str(finished), str(other), "--pool", "--out", str(tmp_path / "pooled")])
    pooled = results(tmp_path / "pooled")
    assert (pooled["seeds"], pooled["students"]["one"]["baseline"]) == ([0, 1, 2], "two")


@pytest.mark.slow
def test_settings_are_searched(finished: Path, tmp_path: Path) -> None:
    run, epochs = tmp_path / "run", ["--trainer.max_steps", "-1", "--trainer.max_epochs", "3"]
    epochs += ["--trainer.val_check_interval", "1.0"]
    search = ["--tune", "3", "--tune_seeds", "1", "--search.model.lr", "[0.001, 0.01, 0.03]"]
    flags = [*epochs, *search, "--seeds", "1", "--decode_at", "8", "--out", str(run)]
    gpt.main([*of(finished, *TWO, *ONE), *flags])
    assert "decode_ms_8" in (run / "seed0" / "students.json").read_text()
    assert not any("decode_ms" in path.read_text() for path in run.glob("tuning/seed*/*.json"))  # alike in all settings
    tuned = results(run)["tuning"]
    assert [len(of_net["settings"]) for of_net in tuned.values()] == [3, 3]
    assert {*tuned["one"]["settings"][0]["options"]} == {"model.lr", "model.weight_decay"}
    assert tuned["one"]["settings"][1]["options"] == tuned["two"]["settings"][1]["options"]
    shutil.rmtree(run / "tuning")
    assert math.isfinite(results(run)["students"]["one"]["test_bpc"][0])


@pytest.mark.slow
def test_the_zoo_is_of_all_nets_that_fit(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    sizes = [f for name in gpt.zoo_variants() for f in (f"--variants.{name}.num_layers", "1")]
    flags = ["--zoo", "true", "--trainer.max_steps", "2", *sizes, "--seeds", "1", "--out", str(run)]
    gpt.main([*of(finished, *flags), "--decode_at", "32"])
    students = results(run)["students"]
    assert {"mha", "one_head", "no_bias"} <= {*students} <= {*gpt.zoo_variants()}
    assert [*students] == sorted(students, key=lambda name: students[name]["test_bpc"][0])
    key = f"decode_ms_32_{torch.get_num_threads()}"
    assert all(student[key] > 0 for student in students.values())
    assert "ms a token at 32 (" in (run / "results.md").read_text()
