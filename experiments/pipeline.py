"""A net on one device, split over several, and pipelined: which schedule, cut and micro-batches are fastest here.

    python experiments/pipeline.py --trainer.devices 2                     # all of it: hours on 2 CPU cores
    python experiments/pipeline.py --trainer.devices 2 --repeats 3         # 77 minutes
    python experiments/pipeline.py --split_sizes 8 15 30 --repeats 3       # half an hour
    python experiments/pipeline.py --out FOLDER --resume true              # go on; measured rows are kept
    python experiments/pipeline.py --quick true                            # small sizes, to see what comes out
    python experiments/pipeline.py --net ResNet --net.depth 56 --cut_after stage2 --image_size 32 --num_classes 10

The experiment of PyTorch's tutorial "Single-Machine Model Parallel Best Practices": ResNet-50 on noise, cut as there,
after layer2, and where the layers' times say. Each row is a fit of its own, timed inside its ranks, with one thread a
rank on a CPU. OUT/ holds report.html, results.json, .md and .png, timeline.png, and its events. It ends with what to
take for this net on this machine.
"""

from harness import start

if __name__ == "__main__":
    start.script(OMP_WAIT_POLICY="PASSIVE")  # threads that spin while they wait slow small nets down

import copy
from collections.abc import Sequence
from functools import partial
from typing import get_args

from torch import nn

from apprentice.errors import BadInput
from harness import cli
from harness.runs.session import session
from harness.runs.training_options import add_trainer
from harness.studies.choices import make_net
from lab.studies.isolation import IDLE, default_devices, one_thread
from lab.studies.pipeline import Bench, Case, Cases, Cut, Noise, Options, Study, Task
from lab.studies.pipeline.cases import TUTORIALS_CUT
from lit_modules import nets
from strategies.pipeline import Schedule


def parser() -> cli.Parser:
    """Make the command line: sizes, net, trainer; the pipeline strategy's options are those of its rows."""
    parser = cli.Parser("pipeline.py", (__doc__ or "").split("\n", 1)[0], Options)
    resnet = {"class_path": "Torchvision", "init_args": {"name": "resnet50"}}
    net = cli.Classes((nets.Net, nn.Module), nets, frozenset({"input_shape", "num_classes"}))
    parser.add_choice("net", net, resnet)
    strategy = {"class_path": "pipeline", "init_args": {"balance": "time"}}
    idle = [*IDLE, "gradient_clip_val", "gradient_clip_algorithm"]
    add_trainer(parser, loggers=False, idle=idle, devices=default_devices(), strategy=strategy)
    return parser


def other_cut(net: nn.Module, layers: Sequence[nn.Module], path: str | None) -> Cut | None:
    """Return the cut after the layer at `path`; None for the tutorial's layer where the net has none of that name."""
    if path is None or (path == TUTORIALS_CUT and path not in dict(net.named_modules())):
        return None
    try:
        first = nets.find_stage(net, layers, path)[0] + 1
    except BadInput:
        first = len(layers)
    if first == len(layers):
        raise BadInput("cut_after", path, f"a layer of {type(net).__name__} with others behind it, or null")
    return Cut(f"after {path.removeprefix('model.')}", [first, len(layers) - first])


def module(layers: list[nn.Module], case: Case) -> Task:
    """Build a case's module, with the same first weights in every case."""
    return Task(copy.deepcopy(layers), case.num_microbatches if case.kind == "one" else 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line describes."""
    with one_thread(), session("pipeline", parser(), argv) as run:
        run.announce()
        config = run.config
        shape = (3, config.image_size, config.image_size)
        sizes = {"input_shape": shape, "num_classes": config.num_classes}
        net = make_net(config, "net", config.seeds[0], sizes)
        with cli.refusals(config.net, "net"):
            layers = nets.pipeline_stages(net)
        cut = other_cut(net, layers, config.cut_after)
        cases = Cases(config, get_args(Schedule), cut)
        loader = partial(Noise, config.batch_size, shape, config.num_classes, seed=config.seeds[0])
        bench = Bench(partial(module, layers), loader, config.batches, config.repeats)
        with run.folder():
            Study(run).run(bench, cases)


if __name__ == "__main__":
    start.run(main)
