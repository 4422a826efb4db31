"""Ranks that are killed, nodes that go and come: under torchrun the job goes on and ends as if nothing had happened."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from experiments import kd
from tests.launching import TINY, assert_close, ended, faults, free_port, torchrun, until, weights
from tests.processes import Run

OFTEN = [*TINY, "--checkpoint_every", "1e-9"]  # a checkpoint a step
EXACT, DOUBLE = ["--exact", "2"], ["--trainer.precision", "64-true"]


def alone(out: Path, *flags: str) -> Path:
    """A run that nothing disturbs."""
    ended([Run(kd.main, [*TINY, *flags, "--out", str(out)], log=out.with_suffix(".log"))])
    return out


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again_and_the_bits_are_the_same(tmp_path: Path) -> None:
    whole = alone(tmp_path / "whole", "--trainer.devices", "2")
    killed = faults(tmp_path / "faults.yaml", ("Killed", {"rank": 1, "step": 5}))
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    job = torchrun(
        *meeting, "--nproc_per_node", "2", "--max_restarts", "3", log=tmp_path / "log", flags=[*OFTEN, *killed]
    )
    assert job.wait(200) == 0, job.output
    assert (tmp_path / "Killed").exists()
    (out,) = (tmp_path / "runs" / "kd").iterdir()  # the ranks of both attempts share one run
    assert weights(out) == weights(whole)


def agent(name: str, port: int, argv: Sequence[str], nodes: tuple[int, int], workers: int) -> None:
    """What torchrun does after reading its command line; its workers are forked, which spares the imports."""
    os.environ |= {"NODE": name, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    config = LaunchConfig(
        *nodes, workers, run_id="test", rdzv_backend="c10d", rdzv_endpoint=f"127.0.0.1:{port}", max_restarts=3,
        rdzv_configs={"last_call_timeout": 1, "is_host": name == "A"}, start_method="fork", local_addr="127.0.0.1",
        monitor_interval=0.1,
    )  # fmt: skip
    elastic_launch(config, kd.main)(list(argv))


GO_AND_COME = [
    ("Left", {"node": "B", "step": 2}),
    ("Held", {"node": "A", "step": 5, "world_size": 1}),
]


@pytest.mark.slow
def test_a_node_leaves_and_another_joins_in_float64(tmp_path: Path) -> None:
    whole, port = alone(tmp_path / "whole", *DOUBLE), free_port()
    argv = [*OFTEN, *DOUBLE, *faults(tmp_path / "faults.yaml", *GO_AND_COME), "--out", str(tmp_path / "run")]
    nodes = {name: Run(agent, name, port, argv, (1, 2), 1, log=tmp_path / name) for name in "AB"}
    until((tmp_path / "Held").exists, *nodes.values())
    nodes["C"] = Run(agent, "C", port, argv, (1, 2), 1, log=tmp_path / "C")
    ended([nodes["A"], nodes["C"]], 120)
    assert nodes["B"].wait() == -9
    assert_close(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_worker_that_is_killed_in_the_exact_mode(tmp_path: Path) -> None:
    whole = alone(tmp_path / "whole", *EXACT)
    killed = faults(tmp_path / "faults.yaml", ("Killed", {"rank": 0, "step": 3}))
    argv = [*OFTEN, *EXACT, *killed, "--out", str(tmp_path / "run")]
    ended([Run(agent, "A", free_port(), argv, (1, 1), 2, log=tmp_path / "A")], 120)
    assert (tmp_path / "Killed").exists()
    assert weights(tmp_path / "run") == weights(whole)


@pytest.mark.slow
def test_a_node_leaves_and_another_joins_with_the_same_bits(tmp_path: Path) -> None:
    whole, port = alone(tmp_path / "whole", *EXACT), free_port()
    argv = [*OFTEN, *EXACT, *faults(tmp_path / "faults.yaml", *GO_AND_COME), "--out", tmp_path / "run"]
    elastic = ["--nnodes", "1:2", "--nproc_per_node", "1", "--max_restarts", "3", "--rdzv_id", "test"]
    elastic += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--local_addr", "127.0.0.1"]

    def node(name: str) -> Any:
        settled = f"last_call_timeout=2,is_host={int(name == 'A')}"
        given = {"NODE": name, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return torchrun(*elastic, "--rdzv_conf", settled, log=tmp_path / name, flags=argv, **given)

    nodes = {name: node(name) for name in "AB"}
    until((tmp_path / "Held").exists, *nodes.values())
    nodes["C"] = node("C")
    assert [nodes[name].wait(120) for name in "ACB"] == [0, 0, -9], nodes["A"].output
    assert weights(tmp_path / "run") == weights(whole)
