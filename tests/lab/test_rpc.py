"""What the strategies over RPC share: where ranks meet, checkpoints, statistics, and what they refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import rpc
from torch.multiprocessing import ProcessRaisedException

from harness.runs.quiet import quiet
from lab.strategies import ParamServer, RPCHybrid
from lit_modules.classifier import LitClassifier
from strategies import DataParallel, ZeRO1
from tests.callbacks import Notes, SaveAndStop
from tests.grids import mostly_slow
from tests.lab.test_param_server import Plain, pairs
from tests.lab.test_ring_training import CLIPPED, Normalised, statistics
from tests.launching import free_port
from tests.strategies.test_strategies import STEPS, alone, norm, trained
from tests.training import (
    assert_agree,
    assert_same,
    classifier,
    digits,
    distillation,
    fit,
    net,
    outcome,
    trainer,
    weights,
)

BOTH = pytest.mark.parametrize("strategy", [ParamServer, RPCHybrid])
Chain = list[tuple[Callable[..., DataParallel], int]]
CHAINS: dict[str, Chain] = {
    "param_server": [(ParamServer, 3), (ZeRO1, 2), (ParamServer, 2), (ParamServer, 1)],
    "rpc_hybrid": [(RPCHybrid, 3), (ZeRO1, 2), (RPCHybrid, 2), (ParamServer, 2)],
}


SPLIT = {"devices_per_worker": 2}
QUICK = [
    (ParamServer, {}, "students", 1, {}),
    (RPCHybrid, {}, "students", 1, {}),
    (RPCHybrid, {}, "resnet8", 3, {}),  # its BatchNorm sees the global batch, backward too
]
SLOW = [
    (ParamServer, {}, "students", 2, CLIPPED),
    (ParamServer, {}, "students", 3, {}),
    (ParamServer, {}, "students", 8, {}),
    (ParamServer, {}, "teacher", 3, CLIPPED),
    (ParamServer, {}, "resnet8", 3, {}),
    (RPCHybrid, SPLIT, "students", 2, CLIPPED),
    (RPCHybrid, {}, "students", 3, CLIPPED),
    (RPCHybrid, {}, "students", 8, {}),
    (RPCHybrid, SPLIT, "teacher", 3, {}),
    (RPCHybrid, {"devices_per_worker": [1, 2]}, "teacher", 3, {}),
]


@pytest.mark.parametrize(
    ("strategy", "chosen", "run", "devices", "options"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_float64_agrees_with_one_process(
    strategy: Any, chosen: dict[str, Any], run: str, devices: int, options: dict[str, Any], tmp_path: Path
) -> None:
    right = alone(run, "accumulated and clipped" if options else "plain")
    assert len(right[0]) == 20
    place = f"auto {devices}"
    assert_agree(right, trained(run, place, tmp_path, strategy=strategy(timeout=60, **chosen), **options))


@BOTH
def test_each_sample_is_validated_once_and_replicas_stay_equal(strategy: Any, tmp_path: Path) -> None:
    norms, scores = Notes(tmp_path / "norms", norm, "on_train_batch_end"), {}
    for devices, callbacks in {1: [], 3: [norms]}.items():
        plain = strategy is RPCHybrid and devices == 1  # the baseline, which needs no server
        over_rpc = {} if plain else {"strategy": strategy(timeout=60)}
        options = {**STEPS, "max_steps": 6, "callbacks": callbacks, **over_rpc}
        scores[devices], _ = outcome(
            classifier(), digits(validation_size=50), tmp_path, ["val/acc"], devices, **options
        )
    assert scores[1] == scores[3] != []
    first, *others = norms.of_ranks()
    assert len(first) == 6
    assert others == [first] * 2


@BOTH
@pytest.mark.parametrize("method", mostly_slow(["file", "tcp"], "file"))
def test_ranks_may_meet_anywhere(strategy: Any, method: str, tmp_path: Path) -> None:
    where = f"file://{tmp_path}/meeting" if method == "file" else f"tcp://127.0.0.1:{free_port()}"
    ended = [
        weights(fit(classifier(), digits(), 2, strategy=strategy(timeout=60, init_method=name), max_steps=3))
        for name in (None, where)
    ]
    assert_same(*ended, atol=0)


@pytest.mark.parametrize("chain", mostly_slow(CHAINS, "param_server"))
def test_a_run_goes_on_under_another_strategy_and_number_of_devices(chain: str, tmp_path: Path) -> None:
    right = weights(fit(distillation(["ce", "hint"]), digits(), 1, **STEPS | {"max_steps": 16}))
    path = tmp_path / "saved.ckpt"
    for part, (strategy, devices) in enumerate(CHAINS[chain], 1):
        module = distillation(["ce", "hint"])
        resumed = {"ckpt_path": path, "weights_only": True} if path.exists() else {}
        options = STEPS | {"callbacks": [SaveAndStop(path, 4 * part)], "strategy": strategy(timeout=60)}
        with quiet():
            trainer(devices, **options | {"max_steps": 16}).fit(module, digits(), **resumed)
    assert_same(weights(module), right, atol=1e-9)


@BOTH
@pytest.mark.filterwarnings("ignore:norm. BatchNorm sees the rows of one worker")
def test_all_ranks_validate_with_one_ranks_statistics(strategy: Any, tmp_path: Path) -> None:
    notes = Notes(tmp_path / "statistics", statistics, "on_validation_end")
    data = digits(train_size=112, validation_size=20, batch_size=28)
    fit(Normalised(), data, 3, strategy=strategy(timeout=60), max_epochs=2, callbacks=[notes])
    ranks = notes.of_ranks()
    assert ranks == [ranks[0]] * 3
    assert len(set(ranks[0])) == len(ranks[0]) == 2


# What is refused


class Manual(Plain):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@BOTH
def test_modules_that_step_by_themselves_a_loss_scale_and_lbfgs(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = strategy.rpc_name
    with quiet(), pytest.raises(ValueError, match=f"strategy {name}: expected automatic optimization of Manual"):
        trainer(2, strategy=strategy(timeout=60)).fit(Manual(), pairs())
    made = trainer(2, strategy=strategy(timeout=60))
    monkeypatch.setattr(made.precision_plugin, "scaler", torch.amp.GradScaler("cpu"), raising=False)
    with quiet(), pytest.raises(ValueError, match="precision 16-mixed: expected one without a loss scale"):
        made.fit(Plain(), pairs())
    with quiet(), pytest.raises(ProcessRaisedException, match=f"{name}: expected an optimizer other than LBFGS"):
        fit(LitClassifier(net(), optimizer=torch.optim.LBFGS), digits(), 2, strategy=strategy(timeout=60))


@BOTH
def test_a_platform_without_rpc_is_told_before_anything_starts(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"strategy {strategy.rpc_name}: expected a torch with"):
        trainer(2, strategy=strategy(timeout=60))
