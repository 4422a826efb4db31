"""All distillation methods in one pass beside each by itself, and what each method adds to its student's step.

    python benchmarks/zoo_speed.py                     # ResNet-56 teaches ResNet-8, 32 x 32 images: minutes on 2 cores
    python benchmarks/zoo_speed.py --repeat 3 --steps 10 --only kd rkd --out FILE

Each side is a Lightning fit in a forked process of one thread. With M students that learn from the teacher, T its
forward and S_i a student's step, single runs take M * T + sum of S_i, and one pass T + sum of S_i at best: that ratio
is printed beside the measured one. The teacher runs every batch in all fits, as it does where images are augmented.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import torch
from torch import nn

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from benchmarks import common
from benchmarks.common import Measurement, Noise, Runs, Target
from harness.runs import environment
from harness.runs.progress import peak_memory
from harness.studies import zoo
from lab.studies.isolation import run_forked
from lit_modules import objectives
from lit_modules.distillation import Distillation
from lit_modules.nets import ResNet

TEACHER, ALL = "teacher's forward", "all in one pass"
NAMES = {"ce": "CrossEntropy", "kd": "Hinton"}
TARGETS = {
    "pass / runs": Target("one pass with all methods over the sum of their single runs"),
    "least / runs": Target("the least that this can be, (T + sum S) / (M T + sum S)"),
    "pass / least": Target("one pass over the least", high=1.2),
    "memory": Target("peak memory of one pass over the sum of the single runs'", high=1.0),
}


def net(depth: int, seed: int) -> nn.Module:
    return with_seed(seed, lambda: ResNet(depth))


def module(args: argparse.Namespace, methods: Mapping[str, str]) -> Distillation:
    """Build a module with a student for each method; all have one net."""
    students = {name: (net(args.student, 0), getattr(objectives, method)()) for name, method in methods.items()}
    return Distillation(net(args.teacher, 1), students, teacher_cache_mb=0, samples=len(Noise().split("train").labels))


def pick_methods(args: argparse.Namespace) -> dict[str, str]:
    """Return the methods of `--only` that fit the nets, or all that do."""
    methods = {}
    for name, method in zoo.methods(NAMES).items():
        try:
            module(args, {name: method})
        except BadInput as error:
            print(f"without {name}: {error}")
        else:
            methods[name] = method
    if unknown := set(args.only or ()) - set(methods):
        raise BadInput("only", min(unknown), f"some of {', '.join(methods)}")
    return {name: method for name, method in methods.items() if not args.only or name in args.only}


def measure_forked(seconds: Callable[[], list[float]]) -> list[float]:
    """Return the median seconds in a fork, and its peak memory beyond that of an idle fork, MiB."""
    ((middle, peak),) = run_forked(lambda _: [median(seconds()), peak_memory(common.CPU)])
    (idle,) = run_forked(lambda _: peak_memory(common.CPU))
    return [middle, peak - idle]


def forward(args: argparse.Namespace) -> list[float]:
    environment.keep_memory()  # as in the fits
    teacher, images = net(args.teacher, 1).eval(), torch.rand(args.batch_size, 3, 32, 32)
    teacher = teacher.to(memory_format=torch.channels_last)
    with torch.no_grad():
        return [common.seconds(lambda: teacher(images)) for _ in range(2 + args.steps)][2:]


def steps(args: argparse.Namespace, methods: Mapping[str, str]) -> list[float]:
    return common.step_seconds(module(args, methods), Noise(batch_size=args.batch_size), args.steps)


def measure(args: argparse.Namespace) -> Measurement:
    common.one_thread()
    methods = pick_methods(args)
    rivals: dict[str, Callable[[], list[float]]] = {
        TEACHER: partial(measure_forked, partial(forward, args)),
        **{name: partial(measure_forked, partial(steps, args, {name: method})) for name, method in methods.items()},
        ALL: partial(measure_forked, partial(steps, args, methods)),
    }
    rounds = common.take_turns(rivals, args.rounds)
    milliseconds: Runs = {name: [1e3 * seconds for seconds, _ in runs] for name, runs in rounds.items()}
    mib: Runs = {name: [peak for _, peak in runs] for name, runs in rounds.items() if name != TEACHER}
    num_taught = sum(getattr(objectives, method).uses_teacher for method in methods.values())
    return Measurement({"ms": milliseconds, "MiB": mib}, ratios(milliseconds, mib, list(methods), num_taught))


def ratios(milliseconds: Runs, mib: Runs, methods: Sequence[str], num_taught: int) -> Runs:
    """Return the ratios of each round; `num_taught` methods use the teacher."""
    sums, peaks = (
        [sum(values) for values in zip(*(runs[name] for name in methods), strict=True)] for runs in (milliseconds, mib)
    )
    least = [(total - (num_taught - 1) * t) / total for total, t in zip(sums, milliseconds[TEACHER], strict=True)]
    ratio, memory = common.over(milliseconds[ALL], sums), common.over(mib[ALL], peaks)
    return {"pass / runs": ratio, "least / runs": least, "pass / least": common.over(ratio, least), "memory": memory}


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__, ("--repeat", 3), "rounds of all sides")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each fit")
    parser.add_argument("--batch_size", type=int, default=128, help="images in a batch")
    parser.add_argument("--teacher", type=int, default=56, help="depth of the teacher, a ResNet")
    parser.add_argument("--student", type=int, default=8, help="depth of the students, ResNets")
    parser.add_argument("--only", nargs="+", help="names of methods; default: all that fit")
    common.run(parser.parse_args(argv), measure, TARGETS)


if __name__ == "__main__":
    main()
