"""What a step costs over torch.distributed.rpc, as ratios to `ddp` in one run.

    python benchmarks/rpc_speed.py                        # some minutes on 2 cores
    python benchmarks/rpc_speed.py --devices 2 --rounds 5 --out FILE
    python benchmarks/rpc_speed.py --quick                # seconds: few steps, whose figures say nothing

A figure is the median of a fit's steps on rank zero: the same net, batches of 128 images over all devices, one thread a
process. `param_server` has one worker less than there are devices, and waits for every step ("late": its workers may
lack two); `rpc_hybrid` has one less, too. Ends with exit code 1 where `param_server` takes more than 5 times as long.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

from apprentice.keyed import with_seed
from benchmarks import common
from benchmarks.common import Measurement, Noise, Runs, Target
from lab.strategies import ParamServer, RPCHybrid
from lit_modules.classifier import LitClassifier
from lit_modules.nets import DeepNN, LightNN
from strategies import DDP, DataParallel

NETS = {"LightNN": LightNN, "DeepNN": DeepNN}
RIVALS: dict[str, Callable[[], DataParallel]] = {
    "ddp": DDP,
    "param_server": ParamServer,
    "param_server, late": lambda: ParamServer(max_staleness=2),
    "rpc_hybrid": RPCHybrid,
}
TARGETS = {
    f"{net}, {name}": Target(f"{net}, {name} over ddp", high=5.0 if name == "param_server" else float("inf"))
    for net in NETS
    for name in RIVALS
}


def step_ms(net: str, rival: str, devices: int, steps: int) -> float:
    module, data = LitClassifier(with_seed(0, NETS[net])), Noise(128, validation_size=0)
    return 1e3 * median(common.step_seconds(module, data, steps, 1, devices=devices, strategy=RIVALS[rival]()))


def measure(args: argparse.Namespace) -> Measurement:
    common.one_thread()
    figures, ratios = Runs(), Runs()
    for net in args.nets:
        rivals = {f"{net}, {name}": partial(step_ms, net, name, args.devices, args.steps) for name in RIVALS}
        figures |= common.take_turns(rivals, args.rounds)
        ratios |= {name: common.over(figures[name], figures[f"{net}, ddp"]) for name in rivals}
    return Measurement({"ms a step": figures}, ratios)


def main(argv: Sequence[str] | None = None) -> None:
    command = common.parser(__doc__, ("--rounds", 3), "fits of each rival")
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
