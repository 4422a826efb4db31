"""Ranks that are killed, nodes that go and come: under torchrun the job goes on and ends as if nothing had happened.

The command line, the agents and their meeting are torchrun's; only its workers are forked, which spares the imports.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from experiments import kd
from tests.launching import TINY, assert_close, ended, faults, free_port, until, weights
from tests.processes import Run

OFTEN = [*TINY, "--checkpoint_every", "1e-9"]  # a checkpoint a step
EXACT, DOUBLE = ["--exact", "2"], ["--trainer.precision", "64-true"]


def alone(out: Path, *flags: str) -> Path:
    """A run that nothing disturbs."""
    ended([Run(kd.main, [*TINY, *flags, "--out", str(out)], log=out.with_suffix(".log"))])
    return out


def torchrun(name: str, words: Sequence[str], argv: Sequence[str], folder: Path) -> None:
    """`torchrun WORDS kd.py ARGV` on the node of that name."""
    os.chdir(folder)
    os.environ |= {"NODE": name, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int("1:2" in words))}
    config, _, _ = config_from_args(parse_args([*words, "kd.py"]))
    config = dataclasses.replace(config, start_method="fork")
    elastic_launch(config, kd.main)(list(argv))


def meeting() -> list[str]:
    port = free_port()
    where = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}", "--local_addr", "127.0.0.1"]
    return [*where, "--rdzv_id", f"job{port}"]


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again_and_the_bits_are_the_same(tmp_path: Path) -> None:
    whole = alone(tmp_path / "whole", "--trainer.devices", "2")
    killed = faults(tmp_path / "faults.yaml", ("Killed", {"rank": 1, "step": 5}))
    words = ["--nproc_per_node", "2", "--max_restarts", "3", *meeting()]
    ended([Run(torchrun, "A", words, [*OFTEN, *killed], tmp_path, log=tmp_path / "log")])
    assert (tmp_path / "Killed").exists()
    (out,) = (tmp_path / "runs" / "kd").iterdir()  # the ranks of both attempts share one run
    assert weights(out) == weights(whole)


@pytest.mark.slow
def test_rank_zero_is_killed_in_the_exact_mode_and_another_job_is_refused(tmp_path: Path) -> None:
    whole = alone(tmp_path / "whole", *EXACT)
    killed = faults(tmp_path / "faults.yaml", ("Killed", {"rank": 0, "step": 3}))
    words, argv = ["--nproc_per_node", "2", "--max_restarts", "3"], [*OFTEN, *EXACT, *killed, "--out", "run"]
    ended([Run(torchrun, "A", [*words, *meeting()], argv, tmp_path, log=tmp_path / "log")])
    assert (tmp_path / "Killed").exists()
    assert weights(tmp_path / "run") == weights(whole)
    again = Run(torchrun, "A", ["--nproc_per_node", "2", *meeting()], argv, tmp_path, log=tmp_path / "again")
    again.check(1)
    said = [line for line in again.output.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, again.output
    assert said[0].startswith("error: --out run: expected a new folder")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exact", "float64"])
def test_a_node_leaves_and_another_joins(kind: str, tmp_path: Path) -> None:
    flags = EXACT if kind == "exact" else DOUBLE
    whole = alone(tmp_path / "whole", *flags)
    events = ("Left", {"node": "B", "step": 2}), ("Held", {"node": "A", "step": 5, "world_size": 1})
    argv = [*OFTEN, *flags, *faults(tmp_path / "faults.yaml", *events), "--out", "run"]
    words = ["--nnodes", "1:2", "--nproc_per_node", "1", "--max_restarts", "3", *meeting()]

    def node(name: str) -> Run:
        conf = ["--rdzv_conf", f"last_call_timeout=1,is_host={int(name == 'A')}"]
        return Run(torchrun, name, [*words, *conf], argv, tmp_path, log=tmp_path / name)

    nodes: dict[str, Any] = {name: node(name) for name in "AB"}
    until((tmp_path / "Held").exists, *nodes.values())
    nodes["C"] = node("C")
    ended([nodes["A"], nodes["C"]])
    assert nodes["B"].wait() == -9
    if kind == "exact":
        assert weights(tmp_path / "run") == weights(whole)
    else:
        assert_close(tmp_path / "run", whole)
