"""The programs of lab/programs print what the pages say, and end with the numbers of one process."""

import importlib
import math
import os
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc

from lab.programs import backends, embedding_server, reinforce
from lab.programs.cartpole import CartPole
from tests.launching import ended
from tests.processes import Run, launch
from tests.training import assert_same

DOCS = Path(__file__).parents[2] / "docs"
TEXT = "".join((DOCS / name).read_text() for name in ("rpc-programs.md", "tutorials.md"))
# A command of a program, and the block below it.
COMMAND = re.compile(
    r"^```bash\n(?:torchrun --standalone --nproc_per_node (\d)|python) -m (lab\.programs\.\w+)\n```\n```\n(.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
COMMANDS = {found[2]: found for found in COMMAND.finditer(TEXT)}


def program(_rank: int, _path: Path, port: int, name: str) -> None:
    os.environ.update(MASTER_PORT=f"{port}", TORCHELASTIC_USE_AGENT_STORE="True")
    warnings.simplefilter("ignore")  # torch's, about its own RPC
    importlib.import_module(name).main([])


def printed(name: str, size: int, path: Path) -> str:
    # As under torchrun the store outlives all ranks: rpc.shutdown() needs it when rank zero may have ended.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return ended(launch(partial(program, port=store.port, name=name), path, size))


def test_the_pages_show_what_the_programs_print() -> None:
    assert {*COMMANDS} == {f"lab.programs.{name}" for name in ("reinforce", "embedding_server", "t5")}


@pytest.mark.parametrize("name", ["reinforce", "embedding_server"])
def test_a_program_prints_what_its_page_says(name: str, tmp_path: Path) -> None:
    size, name, said = COMMANDS[f"lab.programs.{name}"].groups()
    assert printed(name, int(size), tmp_path) == said


def test_the_page_has_the_functions_that_backends_have(tmp_path: Path) -> None:
    lines = [line for line in printed("lab.programs.backends", 2, tmp_path).splitlines() if line]
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == len(backends.FUNCTIONS)
    assert all(line in TEXT for line in lines)


@pytest.mark.slow
@pytest.mark.extras("transformers")
def test_a_t5_under_fsdp_is_read_and_resumed(tmp_path: Path) -> None:
    def main() -> None:
        warnings.simplefilter("ignore")
        importlib.import_module("lab.programs.t5").main([])

    run = Run(main, log=tmp_path / "out", errors=tmp_path / "errors")
    assert run.check() == COMMANDS["lab.programs.t5"][3]


# CartPole and REINFORCE


def test_a_push_obeys_the_equations_of_motion() -> None:
    """Those of Lagrange for a uniform pole, solved for both accelerations."""
    for seed, right in ((0, True), (1, False), (2, True)):
        game = CartPole(seed)
        for _ in range(3):
            game.push(right)
        position, speed, angle, turning = game.state
        sine, cosine, force = math.sin(angle), math.cos(angle), 10.0 if right else -10.0
        moment = 0.1 * 0.5
        left = torch.tensor([[1.1, moment * cosine], [cosine, 0.5 * 4 / 3]], dtype=torch.float64)
        moves, turns = torch.linalg.solve(
            left, torch.tensor([force + moment * turning**2 * sine, 9.8 * sine], dtype=torch.float64)
        ).tolist()
        game.push(right)
        expected = position + 0.02 * speed, speed + 0.02 * moves, angle + 0.02 * turning, turning + 0.02 * turns
        assert game.state == pytest.approx(expected, abs=1e-12)


def test_an_episode_ends_when_the_pole_falls() -> None:
    game = CartPole(0)
    assert all(abs(value) < 0.05 for value in game.state)
    while not game.is_over:
        game.push(right=True)
    assert abs(game.state[2]) > math.radians(12)
    assert 5 < game.steps < 20


def test_rewards_are_discounted() -> None:
    assert reinforce.discount(3).tolist() == pytest.approx([1 + 0.99 + 0.99**2, 1 + 0.99, 1], abs=1e-12)


def learn(rank: int, path: Path, size: int, port: int, batched: bool) -> None:
    os.environ.update(MASTER_PORT=f"{port}", TORCHELASTIC_USE_AGENT_STORE="True")
    warnings.simplefilter("ignore")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size)
    if rank == 0:
        agent = reinforce.Agent(range(1, size) if size > 1 else [0])
        for number in range(2):
            agent.learn(agent.play(number, batched))
        torch.save(agent.policy.state_dict(), path / "policy.pt")
    rpc.shutdown()


def policy(path: Path, size: int, batched: bool) -> dict[str, torch.Tensor]:
    path.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ended(launch(partial(learn, size=size, port=store.port, batched=batched), path, size))
    weights: dict[str, torch.Tensor] = torch.load(path / "policy.pt")
    return weights


def test_any_number_of_observers_learns_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reinforce, "EPISODES", 4)
    alone = policy(tmp_path / "1", 1, batched=False)
    for size in (2, 3):
        assert_same(policy(tmp_path / f"{size}", size, batched=True), alone)


# An embedding on a server


def trainers(rank: int, path: Path, size: int, port: int) -> None:
    os.environ.update(MASTER_PORT=f"{port}", TORCHELASTIC_USE_AGENT_STORE="True")
    warnings.simplefilter("ignore")
    found: list[Any] = []
    lead = embedding_server.lead
    embedding_server.lead = lambda count: found.append(lead(count)) or found[0]  # type: ignore[func-returns-value]
    embedding_server.main()
    if rank == size - 1:
        torch.save(found[0], path / "found.pt")


@pytest.mark.parametrize("count", [1, 3])
def test_trainers_with_a_server_end_like_one_process(count: int, tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ended(launch(partial(trainers, size=count + 2, port=store.port), tmp_path, count + 2))
    losses, weights = torch.load(tmp_path / "found.pt")
    right, expected = embedding_server.train_alone()
    assert losses == pytest.approx(right, abs=1e-12, rel=0)
    assert losses[-1] < 0.6 * losses[0]
    assert_same(weights, dict(expected), atol=1e-12)
