"""The exact mode of the runs that we choose: kept where it can be, on the processes that it needs, and said."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from apprentice.errors import BadInput
from datamodules.streams import cores
from harness.cli.messages import one_line
from harness.runs.launch import find_launch
from harness.runs.session import Session

DEVICES = 8  # on 1 to so many, our recipes and examples have the same bits
COST = "about twice the computing"  # of the training: see docs/exact.md
# What exactness changes: strategy and processes, how batches are cut, and steps, whose faults name no flag.
CHANGES = ("", "exact", "trainer", "data.batch_size", "data.partition")

T = TypeVar("T")


def settle_exact(run: Session, prepare: Callable[[], T]) -> T:
    """Call `prepare`, which checks all that is to be trained; drop an `exact` of ours if it may be why this is refused.

    One that the user has set, or the run that goes on, stays.

    Raises:
        BadInput: also without `exact` of ours.
    """
    exact, trainer = run.config.exact, vars(run.config).get("trainer")
    if exact is None or run.parser.is_given("exact"):
        return prepare()
    try:
        where = _use_cores(run, exact)
        prepared = prepare()
    except BadInput as refused:
        flag = f"{run.parser.flag_of(refused.argument) or ''}."
        if not any(flag.startswith(f"{changed}.") for changed in CHANGES):
            raise
        reason = one_line(refused, run.parser)
        run.change(exact=None, trainer=trainer)
        prepared = prepare()
        run.tell(f"up to rounding: numbers may differ with the devices, as exact is off; {reason}")
    else:
        off = "`exact null` turns it off"
        run.tell(f"exact: the same bits on 1 to {exact} devices, for {COST}{where}; {off}")
    return prepared


def _use_cores(run: Session, exact: int) -> str:
    """Let a process of one thread run on each core in use, unless the user has said how many; return what is told."""
    chosen, processes = run.config.trainer, min(exact, int(os.environ.get("OMP_NUM_THREADS", cores())))
    by_default = all(chosen.init_args[name] == "auto" for name in ("devices", "strategy"))
    if processes < 2 or not by_default or find_launch() is not None or vars(run.config).get("launcher") is not None:
        return ""
    if run.trainer().strategy.root_device.type != "cpu":
        return ""
    run.change(trainer=replace(chosen, init_args={**chosen.init_args, "devices": processes}))
    return f", here by {processes} processes"
