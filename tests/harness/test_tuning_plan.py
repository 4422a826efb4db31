"""What a search plans before it trains: the settings that are tried, which go on, and how many train side by side."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apprentice.errors import BadInput
from experiments import kd
from harness.runs.session import Session
from harness.studies.tuning import spaces, waves
from harness.studies.tuning.halving import Tuning, best_trials, rung_ends
from lit_modules.objectives.search import Choice, Linear, Log
from lit_modules.tasks import ACCURACY, BITS

SMALL = [
    "--data", "Digits", "--data.train_size", "150", "--data.test_size", "100", "--seeds", "[3]", "--teacher", "LightNN",
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Sessions of kd.py by their flags, with their folders open."""

    def opened(*flags: str) -> kd.KD:
        made = Session("kd", kd.parser(), [*SMALL, *flags, "--out", str(tmp_path / "run")])
        made.out = tmp_path / "run"
        made.out.mkdir(exist_ok=True)
        bake_off = kd.KD(made)
        bake_off.check()
        return bake_off

    return opened


# The settings that are tried


def test_settings_begin_with_the_given_one_and_follow_the_data_s_seed(run: Any) -> None:
    made = run("--only", "kd", "--variants.kd.temperature", "4", "--tune", "8")
    drawn = [spaces.draw(made.config, made.arms["kd"], 8, seed) for seed in (0, 0, 1)]
    tried = [[(each.method.init_args, each.optimizer) for each in found] for found in drawn]
    assert tried[0] == tried[1]
    assert tried[0][0] == tried[2][0] == (made.arms["kd"].method.init_args, {})
    assert tried[0][1:] != tried[2][1:]
    assert [each.trial for each in drawn[0]] == [*range(8)]
    temperatures = [options["temperature"] for options, _ in tried[0]]
    assert temperatures[0] == 4
    assert all(1 <= value <= 16 for value in temperatures)
    assert len(set(temperatures)) == 8
    rates = [optimizer["lr"] for _, optimizer in tried[0][1:]]
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)


def test_every_method_tries_the_same_values_of_the_optimizer(run: Any) -> None:
    made = run("--zoo", "true", "--tune", "6", "--optimizer", "SGD", "--search.optimizer.momentum", "linear(0,1)")
    tried = {name: [each.optimizer for each in found] for name, found in Tuning(made).trials.items()}
    assert len(tried) > 20
    assert {name for name, found in tried.items() if found != tried["ce"]} == set()
    assert [sorted(values) for values in tried["ce"]] == [[], *[["lr", "momentum", "weight_decay"]] * 5]
    own = {name: len(spaces.spaces(made.config, arm)) - 3 for name, arm in made.arms.items()}
    assert {1, 2, 3} <= {*own.values()}  # whatever else a method searches
    alone = spaces.draw(made.config, made.arms["rkd"], 4, 0)
    assert [each.method for each in alone] == [each.method for each in Tuning(made).trials["rkd"][:4]]


def test_flags_narrow_and_add_spaces(run: Any) -> None:
    searched = {"kd.temperature": "log(2, 3)", "optimizer.lr": "[0.1,0.2]", "kd.kd_weight": "0.5"}
    searched |= {"kd.ce_weight": "linear(0,1)"}
    made = run("--only", "kd", "--tune", "4", *(f"--search.{key}={value}" for key, value in searched.items()))
    found = spaces.spaces(made.config, made.arms["kd"])
    assert found["temperature"] == Log(2, 3)
    assert found["kd_weight"] == Choice((0.5,))
    assert found["ce_weight"] == Linear(0, 1)
    assert found["optimizer.lr"] == Choice((0.1, 0.2))
    assert "optimizer.weight_decay" in found
    _, *drawn = spaces.draw(made.config, made.arms["kd"], 4, 0)
    assert {each.method.init_args["kd_weight"] for each in drawn} == {0.5}
    assert {each.optimizer["lr"] for each in drawn} <= {0.1, 0.2}


def test_layers_are_searched_where_a_method_or_a_flag_names_them(run: Any) -> None:
    flag = ["--search.cosine.student_layer", "[stage1,stage2]"]
    made = run("--only", "cosine", "fitnet", "hint", "--tune", "8", "--variants.fitnet", "FitNet", *flag)
    Tuning(made).check()
    trials = Tuning(made).trials
    tried = {name: {trial.method.init_args["student_layer"] for trial in trials[name]} for name in trials}
    assert tried == {"cosine": {"default", "stage1", "stage2"}, "fitnet": {"middle", "stage-1"}, "hint": {"default"}}


def test_settings_are_never_the_same_twice(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    made = run("--only", "ce", "--tune", "9", "--tune_optimizer", "false", "--search.ce.label_smoothing", "[0,0.1]")
    assert len(spaces.draw(made.config, made.arms["ce"], 9, 0)) == 2
    Tuning(made).check()
    assert "ce: 2 settings, as its options have no more" in capfd.readouterr().out


@pytest.mark.slow
def test_every_setting_of_the_zoo_builds(run: Any) -> None:
    made = run("--zoo", "true", "--tune", "4")
    assert len(made.arms) > 20
    Tuning(made).check()


def test_peers_are_tried_with_the_same_number(run: Any) -> None:
    dml = ["--variants.a", "DML", "--variants.a.peers", "[b]", "--variants.b", "DML", "--variants.b.peers", "[a]"]
    made = run("--only", "ce", "a", "b", "--tune", "3", *dml)
    search = Tuning(made)
    assert search.teams == [("ce",), ("a", "b")]
    assert search.trials["a"][2].objective(made.config).peers == ["b@2"]
    search.check()
    best = search.search()
    assert search.best["a"] == search.best["b"]
    assert best["a"].objective(made.config).peers == ["b"]


# Which go on


def test_rungs_are_thirds_and_half_of_the_settings_go_on() -> None:
    assert [rung_ends(epochs) for epochs in (1, 2, 3, 10, 240)] == [
        [1], [1, 2], [1, 2, 3], [4, 7, 10], [80, 160, 240],
    ]  # fmt: skip
    scores = {0: 0.5, 1: None, 2: 0.9, 3: 0.5, 4: 0.1}
    assert best_trials(scores, ACCURACY, 3) == [0, 2, 3]
    assert best_trials(scores, ACCURACY, 4) == [0, 2, 3, 4]
    assert best_trials(scores, BITS, 2) == [0, 4]


@pytest.fixture
def largest(run: Any) -> tuple[Any, list[Any], float]:
    """A search of 8 settings, these, and the bytes that the largest takes."""
    made = run("--only", "ce", "kd", "--tune", "4")
    trials = [trial for of_row in Tuning(made).trials.values() for trial in of_row]
    module = made.students(3, made.arms.values(), made.teacher(3).net)
    size = sum(p.numel() * 4 for p in module.students["kd"].parameters())
    largest = max(waves.student_bytes(module, name, made.session, 1) for name in ("ce", "kd"))
    assert 4 * size < largest < 100 * size
    return made, trials, largest


def test_memory_decides_how_many_train_side_by_side(
    largest: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made, trials, size = largest
    units = [[trial] for trial in trials]
    assert waves.in_waves(made, units) == [[trial.name for trial in trials]]
    monkeypatch.setattr(waves, "available_bytes", lambda: math.ceil(3 * size / waves.SHARE) + 8)
    assert [len(wave) for wave in waves.in_waves(made, units)] == [3, 3, 2]
    assert "tuning: 8 settings in 3 waves of at most 3, as one takes up to " in capfd.readouterr().out


def test_a_gpu_is_asked_for_its_memory_without_cuda(
    largest: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made, trials, size = largest
    gpus = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda", 0)), device_ids=[0, 1])
    monkeypatch.setattr(made.session, "trainer", lambda: SimpleNamespace(**vars(gpus), world_size=1))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    tool = tmp_path / "nvidia-smi"
    mebibytes = math.ceil(3 * size / waves.SHARE / waves.MIB)
    most = int(waves.SHARE * mebibytes * waves.MIB / size)
    known = f'[ "$3" = --id=4,GPU-7 ] && echo 80000 && echo {mebibytes}'
    for answer, sizes in (
        (known, [most] * (8 // most) + [8 % most] * (8 % most > 0)), ("echo '[N/A]'", [8]), ("exit 9", [8]),
    ):  # fmt: skip
        tool.write_text(f"#!/bin/sh\n{answer}\n")
        tool.chmod(0o755)
        assert [len(wave) for wave in waves.in_waves(made, [[trial] for trial in trials])] == sizes
        unknown = "tuning: all settings in one wave, as the GPU's free memory is not known; fewer by --tune_wave N\n"
        assert (unknown in capfd.readouterr().out) is (answer != known)
    assert not torch.cuda.is_initialized()


def test_another_wave_is_planned_until_settings_have_trained(run: Any) -> None:
    made = run("--only", "ce", "hint", "--tune", "2", "--tune_seeds", "[7]")

    def resumed(wave: int | None) -> list[int]:
        made.config.resume, made.config.tune_wave = True, wave
        Tuning(made).check()
        return [len(wave) for wave in Tuning(made)._plan_waves()]

    assert [resumed(wave) for wave in (None, 1, 3, None, 2)] == [[4], [1] * 4, [3, 1], [4], [2, 2]]
    trained = made.session.out / "tuning" / "seed7" / "rung1.ckpt"
    trained.parent.mkdir()
    trained.touch()
    assert resumed(2) == [2, 2]
    with pytest.raises(BadInput, match=r"^tune_wave 1: expected 2, as the search in .* began; leave it out"):
        resumed(1)
    made.arms |= {"kd": replace(made.arms["ce"], row="kd", variant="kd")}
    assert resumed(1) == [2, 2, 1, 1]  # only those that came later can
