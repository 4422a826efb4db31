"""What a step costs over torch.distributed.rpc, as ratios to `ddp`, and what it gains to answer calls together.

    python benchmarks/rpc_speed.py                        # some minutes on 2 cores
    python benchmarks/rpc_speed.py --devices 2 --rounds 5 --out FILE
    python benchmarks/rpc_speed.py --parts batching       # calls answered together alone
    python benchmarks/rpc_speed.py --quick                # seconds: few steps, whose figures say nothing

strategies: a figure is the median of a fit's steps on rank zero: the same net, batches of 128 images over all devices,
one thread a process. `param_server` has one worker less than there are devices. Ends with exit code 1 where it takes
more than 5 times as long.

batching: a figure is the time of rounds of `lab/programs/reinforce.py` over their actions, and the agent's processor
time: the states of all observers answered together, by one forward, or each alone. The wider the policy, the more of
that is its forward, whose weights are then read once for all.
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch.distributed import rpc

from apprentice.keyed import with_seed
from benchmarks import common
from benchmarks.common import Measurement, Noise, Runs, Target
from lab.programs.reinforce import Agent
from lab.strategies import ParamServer
from lab.studies.isolation import run_forked
from lit_modules.classifier import LitClassifier
from lit_modules.nets import DeepNN, LightNN
from strategies import DDP, DataParallel

NETS = {"LightNN": LightNN, "DeepNN": DeepNN}
RIVALS: dict[str, Callable[[], DataParallel]] = {
    "ddp": DDP,
    "param_server": ParamServer,
}
PARTS = ("strategies", "batching")
WIDTHS = (128, 131_072)  # of the policy's hidden layer; the tutorial's is 128
TARGETS = {
    f"{net}, {name}": Target(f"{net}, {name} over ddp", high=5.0 if name == "param_server" else float("inf"))
    for net in NETS
    for name in RIVALS
} | {
    f"{width}, {field}": Target(f"{what}, policy of {width:,} units, together over alone")
    for width in WIDTHS
    for field, what in (("waiting", "an action"), ("computing", "the agent's processor an action"))
}


def step_ms(net: str, rival: str, devices: int, steps: int) -> float:
    module, data = LitClassifier(with_seed(0, NETS[net])), Noise(128, validation_size=0)
    return 1e3 * median(common.step_seconds(module, data, steps, 1, devices=devices, strategy=RIVALS[rival]()))


class Action(NamedTuple):
    """Microseconds that an action takes."""

    waiting: float  # of all observers together
    computing: float  # of the agent's processor


def time_actions(hidden: int, observers: int, rounds: int, batched: bool) -> Action:
    """Time the actions of some rounds after a first one."""
    with tempfile.TemporaryDirectory() as folder:

        def rank(number: int) -> Action:
            torch.set_num_threads(1)
            warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # torch's use of one
            options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store")
            rpc.init_rpc(f"rank{number}", rank=number, world_size=observers + 1, rpc_backend_options=options)
            times = play(Agent(range(1, observers + 1), hidden), rounds, batched) if number == 0 else Action(0, 0)
            rpc.shutdown()
            return times

        return Action(*run_forked(rank, observers + 1)[0])


def play(agent: Agent, rounds: int, batched: bool) -> Action:
    agent.play(0, batched)
    start, used = time.perf_counter(), time.process_time()
    episodes = [episode for i in range(rounds) for episode in agent.play(i + 1, batched)]
    spans = time.perf_counter() - start, time.process_time() - used
    return Action(*(1e6 * span / sum(len(episode.actions) for episode in episodes) for span in spans))


def measure(args: argparse.Namespace) -> Measurement:
    common.one_thread()
    parts = {"strategies": measure_strategies, "batching": measure_batching}
    return common.merge([parts[name](args) for name in args.parts])


def measure_strategies(args: argparse.Namespace) -> Measurement:
    figures, ratios = Runs(), Runs()
    for net in args.nets:
        rivals = {f"{net}, {name}": partial(step_ms, net, name, args.devices, args.steps) for name in RIVALS}
        figures |= common.take_turns(rivals, args.rounds)
        ratios |= {name: common.over(figures[name], figures[f"{net}, ddp"]) for name in rivals}
    return Measurement({"ms a step": figures}, ratios)


def measure_batching(args: argparse.Namespace) -> Measurement:
    waiting, computing, ratios = Runs(), Runs(), Runs()
    for width in WIDTHS:
        rivals = {
            f"{width:,} units, {name}": partial(time_actions, width, args.observers, 1 if args.quick else 5, batched)
            for name, batched in (("together", True), ("alone", False))
        }
        runs = common.take_turns(rivals, args.rounds)
        for field, figures in (("waiting", waiting), ("computing", computing)):
            sides = {name: [getattr(action, field) for action in actions] for name, actions in runs.items()}
            ratios[f"{width}, {field}"] = common.over(*sides.values())
            figures.update(sides)
    return Measurement({"µs an action": waiting, "µs of the agent's processor an action": computing}, ratios)


def main(argv: Sequence[str] | None = None) -> None:
    command = common.parser(__doc__, ("--rounds", 3), "fits of each rival")
    command.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    command.add_argument("--observers", type=int, default=3, help="processes that ask for actions")
    command.add_argument("--devices", type=int, default=3, help="processes")
    command.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    command.add_argument("--steps", type=int, default=24, help="of a fit")
    command.add_argument("--quick", action="store_true", help="one short round of the smaller net, and no verdict")
    args = command.parse_args(argv)
    if args.quick:
        args.nets, args.steps, args.rounds = ["LightNN"], 4, 1
    common.run(args, measure, TARGETS, strict=not args.quick)


if __name__ == "__main__":
    main()
