"""One call of an experiment: the folder that it works in, what it says of itself there, and how to go on with it."""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import config as cli
from harness.runs import environment, folders, signals, job, manifest
from apprentice.errors import BadInput
from harness.runs.files import write_json, write_text
from harness.config.sources import INVOCATION, flat


@contextmanager
def opened(experiment: str, command: cli.Parser, config: Namespace) -> Iterator[Path]:
    """The run's folder, locked.

    Args:
        experiment: its name.
        command: the command line.
        config: what it said, of `cli.RunOptions`.

    Raises:
        BadInput: the folder can't be written, is in use, or holds a run that is neither gone on with nor replaced, or
            is to be replaced by one that reads its files.
        Interrupted: the user asked to stop; how to go on has been said.
    """
    out = Path(config.out) if config.out else folders.new_folder(experiment)
    if config.overwrite:
        _check_inputs(out, command.as_dict(config), config.seeds[0])
    with folders.opened(out, config.resume, config.overwrite):
        try:
            yield out
        except signals.Interrupted:
            sys.stderr.write(f"stopped; go on with: python experiments/{command.prog} --out {out} --resume true\n")
            raise


def _check_inputs(out: Path, settings: dict[str, Any], seed: int) -> None:
    """Raise BadInput if a setting names a file, or a folder of files, that would be deleted before it is read."""
    own = {place for path in manifest.recorded(out) for place in (path, *path.parents)} - {out, *out.parents}
    own = {place.absolute() for place in own}
    for flag, value in flat(settings):
        if isinstance(value, str) and flag not in INVOCATION:
            given = os.path.abspath(value.replace("{seed}", str(seed)))  # noqa: PTH100 - Path keeps ..
            if Path(given) in own:
                expected = f"--{flag} outside of {out}, the files of which are deleted first; it is {value}"
                raise BadInput("overwrite", "true", expected)


def describe(out: Path, command: cli.Parser, config: Namespace) -> None:
    """Write config.yaml and environment.json into the run's folder."""
    if job.is_main_process():
        command.save(config, out / "config.yaml", write_text)
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
