"""Reinforcement learning over RPC: an agent, which learns to balance CartPole, and observers, which play for it.

    torchrun --standalone --nproc_per_node 3 -m lab.programs.reinforce               # an agent and two observers
    torchrun --standalone --nproc_per_node 3 -m lab.programs.reinforce --no-batched  # each state is answered alone

As in PyTorch's tutorials on RPC, observers send a state and get an action, and the policy stays with the agent. It
learns by REINFORCE (Williams 1992) after each round of episodes. Batched, it answers when all observers wait, by one
forward, in a function that returns futures.

First states and actions are drawn by seed, episode and step, and gradients are computed of whole episodes in their
order: any number of observers, batched or not, ends with the same weights to the bit. A single process is both.
"""

import argparse
import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future

from apprentice import keyed
from lab.programs.cartpole import CartPole

EPISODES = 8  # of a round
DISCOUNT = 0.99  # of a reward, for each step that it comes later
LEARNING_RATE = 0.01


class Episode(NamedTuple):
    """What an observer has seen."""

    states: Tensor  # (T, 4) float64
    actions: Tensor  # (T,) int64: 1 is a push to the right


class Agent:
    """The policy, and the observers that wait for its actions.

    Args:
        observers: their ranks.
        hidden: width of the policy's one hidden layer.
        seed: of weights, first states and actions.
    """

    def __init__(self, observers: Sequence[int], hidden: int = 128, seed: int = 0) -> None:
        self.observers = observers
        self.policy = keyed.with_seed(seed, partial(make_policy, hidden))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), LEARNING_RATE)
        self.seed = seed
        self._lock = threading.Lock()  # calls arrive in several threads
        self._playing = 0  # observers that have not finished their round
        self._waiting: list[tuple[Tensor, float, Future]] = []

    def act(self, states: Tensor, draws: Tensor) -> list[bool]:
        """Push to the right where the draw, uniform in [0, 1), is below its probability: (b, 4), (b,) -> b answers."""
        with torch.no_grad():
            pushes: list[bool] = (draws < self.policy(states).softmax(-1)[:, 1]).tolist()
        return pushes

    def answer_together(self, state: Tensor, draw: float) -> Future:
        """Return the future answer, which comes when all that play have asked."""
        answer: Future = Future()
        with self._lock:
            self._waiting.append((state, draw, answer))
            self._answer_all()
        return answer

    def finish(self) -> None:
        """An observer has played its episodes, so the others wait for it no longer."""
        with self._lock:
            self._playing -= 1
            self._answer_all()

    def _answer_all(self) -> None:
        if not self._waiting or len(self._waiting) < self._playing:
            return
        states, draws, answers = zip(*self._waiting, strict=True)
        self._waiting.clear()
        pushes = self.act(torch.stack(states), torch.tensor(draws, dtype=torch.float64))
        for answer, push in zip(answers, pushes, strict=True):
            answer.set_result(push)

    def play(self, number: int, batched: bool) -> list[Episode]:
        """Have a round's episodes played by the observers, in turn; return them in order."""
        agent, count = rpc.RRef(self), len(self.observers)
        seeds = [keyed.fold_in(self.seed, number * EPISODES + i) for i in range(EPISODES)]
        self._playing = count
        calls = [
            rpc.rpc_async(rank, play_episodes, args=(agent, seeds[i::count], batched), timeout=0)
            for i, rank in enumerate(self.observers)
        ]
        played = [call.wait() for call in calls]
        return [played[i % count][i // count] for i in range(EPISODES)]

    def learn(self, episodes: Sequence[Episode]) -> float:
        """Take a step with the gradient of all episodes; return their mean length."""
        returns = [discount(len(episode.actions)) for episode in episodes]
        every = torch.cat(returns)
        self.optimizer.zero_grad()
        for episode, values in zip(episodes, returns, strict=True):
            advantage = (values - every.mean()) / every.std()
            log_p = self.policy(episode.states).log_softmax(-1)  # (T, 2)
            (-(log_p.gather(1, episode.actions[:, None])[:, 0] * advantage).sum() / len(episodes)).backward()
        self.optimizer.step()
        return len(every) / len(episodes)


def make_policy(hidden: int) -> nn.Module:
    """Return a net from a state, (b, 4) float64, to logits of left and right, (b, 2)."""
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 2)).double()


def discount(steps: int) -> Tensor:
    """Return the sum of the rewards from each step on, (steps,) float64: a reward of 1 a step, discounted."""
    left = torch.arange(steps, 0, -1, dtype=torch.float64)
    return (1 - DISCOUNT**left) / (1 - DISCOUNT)


# Called by the observers at the agent


def answer(agent: Any, state: Tensor, draw: float) -> bool:
    """Answer a state alone."""
    return agent.local_value().act(state[None], torch.tensor([draw], dtype=torch.float64))[0]


@rpc.functions.async_execution
def answer_together(agent: Any, state: Tensor, draw: float) -> Future:
    """Answer a state with all others that wait; no thread waits."""
    return agent.local_value().answer_together(state, draw)


def finish(agent: Any) -> None:
    """Tell the agent that this observer has played its episodes."""
    agent.local_value().finish()


# Called by the agent at an observer


def play_episodes(agent: Any, seeds: Sequence[int], batched: bool) -> list[Episode]:
    """Play the episodes of these seeds, one after the other."""
    episodes = []
    for seed in seeds:
        game, states, actions = CartPole(seed), [], []
        while not game.is_over:
            states.append(game.tensor())
            draw = keyed.fold_in(seed, game.steps) / 2**32
            ask = answer_together if batched else answer
            actions.append(rpc.rpc_sync(agent.owner(), ask, args=(agent, states[-1], draw)))
            game.push(actions[-1])
        episodes.append(Episode(torch.stack(states), torch.tensor(actions, dtype=torch.int64)))
    rpc.rpc_sync(agent.owner(), finish, args=(agent,))
    return episodes


def main(argv: Sequence[str] | None = None) -> None:
    """Start this process's RPC agent; rank 0 learns, the others answer its calls until it has learnt."""
    command = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    command.add_argument("--rounds", type=int, default=4, help=f"of {EPISODES} episodes, with a step after each")
    command.add_argument("--batched", action=argparse.BooleanOptionalAction, default=True, help="one forward for all")
    args = command.parse_args(argv)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size)
    if rank == 0:
        agent = Agent(range(1, size) if size > 1 else [0])
        for number in range(args.rounds):
            length = agent.learn(agent.play(number, args.batched))
            print(f"round {number + 1}: the pole stands for {length:.1f} steps")
    rpc.shutdown()


if __name__ == "__main__":
    main()
