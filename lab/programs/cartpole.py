"""CartPole: a pole on a cart, which falls unless the cart is pushed from below it to the left or to the right.

Barto, Sutton & Anderson 1983, "Neuronlike adaptive elements that can solve difficult learning control problems", with
the bounds and the Euler steps of Gym's CartPole-v1. An episode is a function of its seed and the actions.
"""

import math

import torch
from torch import Tensor

from apprentice import keyed

GRAVITY, FORCE, STEP = 9.8, 10.0, 0.02  # m/s², N, s
CART, POLE, HALF_LENGTH = 1.0, 0.1, 0.5  # kg, kg, m
FARTHEST, STEEPEST = 2.4, math.radians(12)  # m from the middle, radians from upright
LONGEST = 500  # steps of an episode
START = 0.05  # the largest value at the start


class CartPole:
    """An episode.

    Args:
        seed: of the first state, uniform in [-0.05, 0.05).

    Attributes:
        state: position in m, speed in m/s, angle in radians, angular speed in radians/s.
        steps: how many were taken; each is a reward of 1.
    """

    def __init__(self, seed: int) -> None:
        draws = keyed.bits(seed, torch.zeros(1, dtype=torch.int64), 4)[0].tolist()
        self.state = tuple(START * (2 * draw / 2**32 - 1) for draw in draws)
        self.steps = 0

    @property
    def is_over(self) -> bool:
        """Whether the pole has fallen, the cart has left, or the time is up."""
        position, _, angle, _ = self.state
        return abs(position) > FARTHEST or abs(angle) > STEEPEST or self.steps >= LONGEST

    def push(self, right: bool) -> None:
        """Push the cart for one step."""
        position, speed, angle, turning = self.state
        mass, cosine, sine = CART + POLE, math.cos(angle), math.sin(angle)
        pushed = ((FORCE if right else -FORCE) + POLE * HALF_LENGTH * turning**2 * sine) / mass
        turns = (GRAVITY * sine - cosine * pushed) / (HALF_LENGTH * (4 / 3 - POLE * cosine**2 / mass))
        moves = pushed - POLE * HALF_LENGTH * turns * cosine / mass
        self.state = position + STEP * speed, speed + STEP * moves, angle + STEP * turning, turning + STEP * turns
        self.steps += 1

    def tensor(self) -> Tensor:
        """Return the state, (4,) float64."""
        return torch.tensor(self.state, dtype=torch.float64)
