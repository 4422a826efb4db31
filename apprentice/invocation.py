"""One call of an experiment: the folder that it works in, what it says of itself there, and how to go on with it."""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from apprentice import cli, environment, folders, interrupts, job
from apprentice.files import write_json


@contextmanager
def opened(experiment: str, command: cli.Parser, config: Namespace) -> Iterator[Path]:
    """The run's folder, locked.

    Args:
        experiment: its name.
        command: the command line.
        config: what it said, of `cli.RunOptions`.

    Raises:
        BadInput: the folder can't be written, is in use, or holds a run that is neither gone on with nor replaced.
        Interrupted: the user asked to stop; how to go on has been said.
    """
    out = Path(config.out) if config.out else folders.new_folder(experiment)
    with folders.opened(out, config.resume, config.overwrite):
        try:
            yield out
        except interrupts.Interrupted:
            sys.stderr.write(f"stopped; go on with: python experiments/{command.prog} --out {out} --resume true\n")
            raise


def describe(out: Path, command: cli.Parser, config: Namespace) -> None:
    """Write config.yaml and environment.json into the run's folder."""
    if job.is_main_process():
        command.save(config, out / "config.yaml")
        write_json(out / "environment.json", environment.hardware() | environment.versions())


def header(
    experiment: str, data: Any, used: dict[str, int], settings: dict[str, Any], seeds: Sequence[int]
) -> dict[str, Any]:
    """How results.json begins.

    Args:
        experiment: its name.
        data: the data module, set up.
        used: counts of its samples that are trained on, validated and tested, as its `used` gives them.
        settings: the configuration, plain.
        seeds: the training seeds.
    """
    return {
        "experiment": experiment, "data": {"name": data.name, **used}, "hardware": environment.hardware(),
        "versions": environment.versions(), "config": settings, "seeds": list(seeds),
    }  # fmt: skip
