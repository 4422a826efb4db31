"""The time of messages and collectives on this machine: gloo, NCCL on GPUs, and our own ring.

    python experiments/comm.py --trainer.devices 2                        # all of it: some minutes on 2 CPU cores
    python experiments/comm.py --only all_reduce_sum broadcast --sizes 1024 16777216
    python experiments/comm.py --backends gloo ring --trainer.devices 3
    python experiments/comm.py --out FOLDER --resume true                 # go on; measured rows are kept
    python experiments/comm.py --quick true                               # two small sizes, to see what comes out

From send and recv to all-to-all, on all ranks and on a sub-group: time, algorithm and bus bandwidth as nccl-tests
define them, and every result checked to the bit. `ring` is lab/strategies/ring; `ring_unchunked` is the all-reduce of
the distributed tutorial, in which each of n ranks sends n / 2 times as much. OUT/ holds report.html, results.json, .md
and .png.
"""

from harness import start

if __name__ == "__main__":
    start.script()

from collections.abc import Sequence

from apprentice.errors import BadInput
from harness import cli
from harness.runs.arm_names import pick
from harness.runs.session import session
from harness.runs.training_options import add_trainer
from lab.strategies import ring
from lab.studies.comm import Backend, Bench, Options, Study, all_cases
from lab.studies.isolation import DURATION, IDLE, default_devices, one_thread, probe

UNUSED = ("precision", "gradient_clip_val", "profiler", "callbacks", "plugins")
OF_FITS = (
    "strategy", "accumulate_grad_batches", "gradient_clip_algorithm", "deterministic", "benchmark", "detect_anomaly",
)  # fmt: skip
BACKENDS = [Backend("gloo"), Backend(ring.NAME), Backend(ring.UNCHUNKED, only_all_reduce=True)]
BLOCK, QUICK_BLOCK = 0.02, 0.002  # seconds: shorter calls are timed several together
NCCL = Backend("nccl", "cuda")


def parser() -> cli.Parser:
    """Make the command line: sizes, operations, backends, and the Trainer's devices."""
    parser = cli.Parser("comm.py", (__doc__ or "").split("\n", 1)[0], Options)
    add_trainer(parser, loggers=False, idle=[*IDLE, *UNUSED, *OF_FITS], devices=default_devices())
    return parser


def world(trainer: cli.Choice) -> tuple[int, list[Backend]]:
    """Return the number of ranks, and the backends for their devices."""
    if (strategy := trainer.init_args["strategy"]) != "auto":
        name = strategy.class_path if isinstance(strategy, cli.Choice) else strategy
        raise BadInput("trainer.strategy", name, "not allowed, as --backends chooses what carries messages")
    probed = probe(trainer, "auto", dict.fromkeys([*DURATION, *UNUSED], "nothing is trained"))
    if probed.num_devices < 2:
        raise BadInput("trainer.devices", probed.num_devices, "at least 2: a message has two ends")
    return probed.num_devices, [NCCL, *BACKENDS] if probed.strategy.root_device.type == "cuda" else BACKENDS


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line describes."""
    with one_thread(), session("comm", parser(), argv) as run:
        run.announce()
        config = run.config
        size, backends = world(config.trainer)
        picked = pick({backend.name: backend for backend in backends}, config.backends, "backends")
        cases = all_cases(size, [*picked.values()], config.only, config.sizes)
        bench = Bench(size, config.repeats, config.timeout, QUICK_BLOCK if config.quick else BLOCK)
        with run.folder():
            Study(run).run(bench, cases)


if __name__ == "__main__":
    start.run(main)
