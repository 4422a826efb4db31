"""Checkpoints of a pipeline are those of one device, both ways."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.runs.quiet import quiet
from strategies import DDP
from tests.callbacks import SaveAndStop
from tests.grids import mostly_slow
from tests.pipelines import MODULES, SHAPES, Conv, Make, fitted, pipeline
from tests.processes import launch
from tests.training import assert_same, digits, trainer, weights


def resumed(make: Make, path: Path, hops: list[tuple[int, Any]]) -> dict[str, torch.Tensor]:
    module = make()
    for number, (devices, strategy) in enumerate(hops):
        module, before = make(), path / f"{number}.ckpt"
        last = number == len(hops) - 1
        stop = SaveAndStop(path / f"{number + 1}.ckpt", 1000 if last else 2 * (number + 1))
        options = {"strategy": strategy, "max_epochs": 4, "callbacks": [stop]}
        with quiet():
            ckpt = str(before) if number else None
            trainer(devices, **options).fit(module, digits(), ckpt_path=ckpt, weights_only=True if number else None)
    return weights(module)


@pytest.mark.parametrize("name", mostly_slow(["teacher", "students"], "teacher"))
def test_runs_go_on_under_ddp_and_back(name: str, tmp_path: Path) -> None:
    one = fitted(MODULES[name], strategy=DDP(exact=8), max_epochs=4)
    shapes = [pipeline(exact=8, **options) for _, options in (SHAPES["3"], SHAPES["2x2"], SHAPES["4"])]
    hops = [
        (2, DDP(timeout=60, exact=8)),
        (3, shapes[0]),
        (4, shapes[1]),
        (1, DDP(timeout=60, exact=8)),
        (2, shapes[2]),
    ]
    assert_same(weights(one), resumed(MODULES[name], tmp_path, hops))
    layouts = [torch.load(tmp_path / f"{n}.ckpt", weights_only=True) for n in (1, 2, 3, 4)]
    for layout in layouts[1:]:
        assert list(layout["state_dict"]) == list(layouts[0]["state_dict"])
        for a, b in zip(layouts[0]["optimizer_states"], layout["optimizer_states"], strict=True):
            assert a["param_groups"] == b["param_groups"]
            assert list(a["state"]) == list(b["state"])
            for i, state in a["state"].items():
                assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in b["state"][i].items()}


def kept(rank: int, folder: Path) -> None:
    """A script that fits and then saves, as each rank of torchrun's runs it."""
    module, made = Conv(), trainer(2, strategy=pipeline())
    with quiet():
        made.fit(module, digits(validation_size=50))
        made.save_checkpoint(folder / "after.ckpt")
    torch.save(module.state_dict(), folder / f"weights{rank}.pt")


def test_a_script_can_save_after_the_fit(tmp_path: Path) -> None:
    for run in launch(kept, tmp_path):
        assert run.wait() == 0, run.output
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    one = fitted(Conv)
    module, made = Conv(), trainer(2, strategy=pipeline(), max_epochs=2)
    with quiet():
        made.fit(module, digits(validation_size=50))
        made.save_checkpoint(tmp_path / "parent.ckpt")
    for state in (saved["state_dict"], *(torch.load(tmp_path / f"weights{n}.pt") for n in range(2))):
        assert list(state) == list(one.state_dict())
        assert_same(state, weights(module))
    assert len(saved["optimizer_states"][0]["state"]) == len(list(one.parameters()))
    assert_same(torch.load(tmp_path / "parent.ckpt", weights_only=True)["state_dict"], weights(module))
