"""Two machines, which are two network namespaces of this one: each has an address of its own, and no other way out."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments import kd
from tests.launching import TINY, Command, ended, faults, ranks, torchrun, until, weights
from tests.processes import Run

ADDRESSES = ("192.0.2.1", "192.0.2.2")  # kept for examples: nobody else has them
PORT = "29500"
EXACT = [*TINY, "--exact", "2"]


def ip(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """The names of two namespaces that are joined by a wire."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    names = [f"apprentice{os.getpid()}{end}" for end in "ab"]
    if (made := ip("netns", "add", names[0])).returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ip("-n", names[0], "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/30", "dev", "wire")
            ip("-n", name, "link", "set", "lo", "up")
            assert ip("-n", name, "link", "set", "wire", "up").returncode == 0
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


def inside(names: list[str]) -> Callable[[int], None]:
    """What puts the process of a rank into the namespace of its node."""

    def enter(rank: int) -> None:
        with Path(f"/run/netns/{names[rank]}").open() as namespace:
            clone_newnet = 0x40000000
            assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), clone_newnet) == 0
        os.environ["NODE"] = "AB"[rank]

    return enter


def by_hand() -> list[dict[str, Any]]:
    """The environments of a rank on each node."""
    given = {"WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_WORLD_SIZE": 2}
    given |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "wire"}
    return [given | {"RANK": rank, "GROUP_RANK": rank} for rank in range(2)]


@pytest.mark.slow
def test_two_nodes_train_as_one_and_the_end_of_one_is_soon_that_of_both(nodes: list[str], tmp_path: Path) -> None:
    ended([Run(kd.main, [*EXACT, "--out", str(tmp_path / "whole")], log=tmp_path / "whole.log")])
    argv = [*EXACT, "--checkpoint_every", "1e-9", "--out", tmp_path / "run"]
    argv += faults(tmp_path / "faults.yaml", ("Left", {"node": "B", "step": 5}))

    def node(number: int) -> Command:
        words = ["--nnodes", "2", "--nproc_per_node", "1", "--node_rank", str(number)]
        words += ["--master_addr", ADDRESSES[0], "--master_port", PORT]
        given = {"NODE": "AB"[number], "GLOO_SOCKET_IFNAME": "wire"}
        return torchrun(*words, log=tmp_path / str(number), flags=argv, within=nodes[number], **given)

    running = [node(0), node(1)]
    until((tmp_path / "Left").exists, *running)
    assert running[0].wait(30) == 1, running[0].output
    running[1].wait(10)
    lines = [line for line in running[0].output.splitlines() if line.startswith("error: ")]
    assert lines == ["error: rank 1 has gone; its own message, if there is one, is above"]
    # The first node is there again, and so is the second.
    ended(ranks(by_hand(), [*argv, "--resume", "true"], tmp_path / "again", inside(nodes)))
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


@pytest.mark.slow
def test_a_wire_that_is_cut_ends_the_run_within_the_timeout(nodes: list[str], tmp_path: Path) -> None:
    argv = [*TINY, "--trainer.strategy", "ddp", "--trainer.strategy.timeout", "4", "--out", tmp_path / "run"]
    argv += ["--trainer.max_epochs", "100000"]
    running = ranks(by_hand(), argv, tmp_path / "log", inside(nodes))
    until(lambda: "epoch" in running[0].output, *running)
    assert ip("-n", nodes[0], "link", "set", "wire", "down").returncode == 0
    assert [run.wait(30) for run in running] == [2, 2], "".join(run.output for run in running)
    for run, other in zip(running, (1, 0), strict=True):
        (line,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
        late = f"every rank to come within that time; rank {other} kept the others waiting"
        assert line == f"error: --trainer.strategy.timeout 4: expected {late}"
