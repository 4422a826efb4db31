"""One call of an experiment, from its flags to its folder: `with session("kd", parser(), argv) as run:`."""

import copy
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

import strategies
from apprentice.errors import BadInput
from datamodules.adapter import DataModuleAdapter
from datamodules.base import InMemoryData
from datamodules.streams import cores
from harness import cli, ranks
from harness.cli.resuming import CALL
from harness.cli.sources import flat
from harness.runs import environment, folders, launch, nets, origins, signals
from harness.runs.arm_names import list_used
from harness.runs.facts import NetFacts
from harness.runs.files import list_recorded, write_json, write_text
from harness.runs.quiet import notice, quiet
from harness.runs.records import Header
from harness.runs.trainer import make_loggers, trainer_factory
from harness.start import called_as, console
from lit_modules.nets.base import Net
from lit_modules.nets.identity import Origin
from lit_modules.tasks import CLASSES, task_class

TOKENIZER = "teacher_tokenizer"
UNSAID = ("optimizer", "scheduler", "metric")  # how keys end whose choices are not announced


class Session:
    """One call of an experiment. The data are loaded when first used; `folder` is the first to write files."""

    used: dict[str, int]  # numbers of samples that the Trainer uses, after `checked_trainer`
    out: Path  # the run's folder, inside `folder`

    def __init__(self, name: str, parser: cli.Parser, argv: Sequence[str] | None = None) -> None:
        self.name, self.parser, self.argv = name, parser, sys.argv[1:] if argv is None else list(argv)
        self.config: Namespace = parser.parse(self.argv)
        self.parsed = self.config  # as the user gave them, where a study changes settings by others
        self.origins: dict[str, Origin] = {}  # of nets, by the flag that chooses one
        self._notices: set[str] = set()
        self._data: InMemoryData | None = None

    def trainer(self, **options: Any) -> Trainer:
        """Make a Trainer with the settings of now, and with arguments as `trainer_factory` says."""
        return trainer_factory(self.config.trainer, self.config.exact)(**options)

    @property
    def data(self) -> InMemoryData:
        """The data module, set up, after joining the ranks that a launcher started."""
        if self._data is None:
            trainer = self.trainer()
            launch.join(trainer)
            data = load_data(self.config)
            data.limit_parts(trainer)
            self._data = data
        return self._data

    @contextmanager
    def with_data(self, data: InMemoryData) -> Iterator[None]:
        """Inside, the data are others, as those of a teacher that takes other inputs."""
        ours, self._data = self.data, data
        try:
            yield
        finally:
            self._data = ours

    def change(self, **settings: Any) -> None:
        """Change settings from here on, in the run's files too; the next Trainer has the new ones."""
        vars(self.config).update(settings)

    @property
    def reads_data(self) -> bool:
        """Whether the data are used: studies of devices do without."""
        return self._data is not None

    def with_settings(self, **settings: Any) -> "Session":
        """Copy the session with other settings; the copy makes its own Trainers and shares data and folder."""
        other = copy.copy(self)
        other.config = Namespace(**{**vars(self.config), **settings})
        return other

    @cached_property
    def samples(self) -> dict[str, Any]:
        """The content of data.json."""
        return folders.describe_samples(self.data)

    @property
    def tensorboard(self) -> bool:
        """Whether TensorBoard's files are written."""
        return self.config.trainer.init_args["logger"] is not False

    def loggers(self, fit: str) -> list[Logger]:
        """Make the loggers that the user has chosen beside TensorBoard's; a fit is a run in each."""
        run = f"{Path(self.config.out or self.name).name}/{fit}"
        return make_loggers(self.config.trainer.init_args["logger"], run)

    @property
    def is_double(self) -> bool:
        return self.config.trainer.init_args.get("precision") in {"64-true", "64", 64}

    def checked_trainer(self) -> Trainer:
        """Make a Trainer and check that it can divide the data among its devices; BadInput if it can't."""
        trainer = self.trainer()
        self.loggers("check")
        self.data.check_replicas(self.replicas(trainer), self.config.exact)
        self.used = self.data.used(trainer)
        return trainer

    @contextmanager
    def batches_of(self, rows: int | None) -> Iterator[None]:
        """Inside, training batches have so many rows; None leaves their size as it is."""
        usual = self.data.batch_size
        self.data.batch_size, self.data.evaluated_rows = rows or usual, usual
        try:
            yield
        finally:
            self.data.batch_size, self.data.evaluated_rows = usual, None

    @staticmethod
    def replicas(trainer: Trainer) -> int:
        """Return among how many ranks a batch is divided."""
        sampler = trainer.distributed_sampler_kwargs or {}
        return int(sampler.get("num_replicas", 1))

    def tell(self, line: str) -> None:
        """Print a notice, once."""
        if line not in self._notices:
            self._notices.add(line)
            notice(cli.as_flags(line, self.parser))

    def announce(self) -> None:
        """Tell the user what will run, and where it is written."""
        where = self.config.out or f"a new folder in runs/{self.name}"
        notice(f"{self.name}: {self._summary()}; writes to {where}")
        devices = self.config.trainer.init_args["devices"] if "trainer" in self.config else "auto"
        are_ours = launch.find_launch() is None and not torch.cuda.is_available()
        if are_ours and isinstance(devices, int) and devices > cores():
            slower = f"takes longer than with `trainer.devices {cores()}`"
            self.tell(f"`trainer.devices {devices}`: {devices} processes share {cores()} cores, so each fit {slower}")

    def _summary(self) -> str:
        """Name choices but the optimizer, and the recipe: `data Digits, teacher DeepNN, variants ce kd, seed 0`."""
        parts, config = {}, self.config
        for key, chosen in vars(config).items():
            if key in self.parser.classes and chosen and not key.endswith(UNSAID):
                names = list_used(config, key) if isinstance(chosen, dict) else [getattr(chosen, "name", chosen)]
                parts[key] = " ".join(map(str, names))
        seeds = config.seeds if len(config.seeds) < 10 else [*config.seeds[:3], "...", config.seeds[-1]]
        parts["seeds" if len(seeds) > 1 else "seed"] = " ".join(map(str, seeds))
        if recipe := vars(config).get("recipe"):
            parts["recipe"] = recipe
        return ", ".join(f"{key} {what}" for key, what in parts.items())

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Open and lock the run's folder, `out` or a new one; where a signal ends it, print the command that resumes.

        Raises:
            BadInput: the folder can't be used (`folders.open_folder`), is to be replaced by a run that reads its
                files, or holds a run that lacks a finished net or began with other data.
        """
        config, job = self.config, launch.torchrun_job(self.argv)
        self.out = Path(config.out) if config.out else folders.new_folder(self.name, job)
        values = dict(flat(self.parser.as_dict(config)))
        if config.overwrite:
            values = {flag: value for flag, value in values.items() if self.parser.on_resume(flag) is not CALL}
            _check_inputs(self.out, values, config.seeds[0])
        with folders.open_folder(self.out, config.resume, config.overwrite, job):
            if not config.out:
                notice(f"writes to {self.out}")
            with launch.main_first("finished"):
                if launch.is_main_process():
                    nets.check_finished(self.out)
                    if self.reads_data:
                        folders.check_samples(self.out, self.samples, listed=self.data.split_list())
                    origins.check_origins(self.out, self.origins, values)
            again = f"{called_as(self.parser.prog)} {shlex.join(self._flags_to_resume())}"
            with signals.advise_at_stop(f"stopped; go on with: {again}\n" if launch.is_main_process() else ""):
                yield self.out

    def _flags_to_resume(self) -> list[str]:
        """Return the flags that resume the run: its folder, and options that its files don't hold, such as `export`."""
        flags: dict[str, Any] = {"out": self.out, "resume": "true"}
        for flag, value in flat(self.parser.as_dict(self.config)):
            if flag not in {*flags, "overwrite"} and value and self.parser.on_resume(flag) is CALL:
                flags[flag] = value
        return cli.argv_of(flags)

    def describe(self) -> None:
        """Write config.yaml, environment.json, data.json and, if they hold something, nets.json and split.csv."""
        if launch.is_main_process():
            write_text(self.out / "config.yaml", self.parser.dump(self.parsed, of_run=True))
            write_json(self.out / environment.FILE, environment.facts(self.out, self.parser.prog, self.argv))
            origins.write(self.out, self.origins)
            if self.reads_data and not (self.out / folders.SAMPLES).exists():
                write_json(self.out / folders.SAMPLES, self.samples)
                folders.write_split(self.out, self.data)

    def header(self) -> Header:
        """Make the beginning of results.json: what was run, on what."""
        return Header(
            experiment=self.name, data={"name": self.data.name, **self.used}, fingerprint=self.samples["fingerprint"],
            hardware=next(iter(environment.machines(self.out)), environment.hardware()),
            versions=environment.versions(), commits=environment.commits(self.out),
            config=self.parser.as_dict(self.config), free=self.parser.free, seeds=list(self.config.seeds),
            origins={key: origin for key, origin in self.origins.items() if origin != Origin({})},
        )  # fmt: skip

    def net_facts(self) -> NetFacts:
        """Say what users of a net that this run trains need to know."""
        data = self.data
        return NetFacts(
            task=data.task, inputs=data.preparation, versions=environment.versions(),
            classes=tuple(data.class_names) if task_class(data.task).outputs == CLASSES else (),
            commit=environment.last_commit(self.out),
        )  # fmt: skip


@contextmanager
def session(name: str, parser: cli.Parser, argv: Sequence[str] | None = None) -> Iterator[Session]:
    """Parse the flags and set up the process: signals, memory, float32 arithmetic; the block is the experiment `name`.

    Raises:
        SystemExit: with code 2 after one line on stderr, for what the user can correct; after --help; on a signal.
    """
    with console(), cli.one_line_errors(parser), signals.handle_signals(), quiet():
        ranks.check_variables()
        vars(rank_zero_only)["rank"] = ranks.rank()  # Lightning has read other variables, in another order
        run = Session(name, parser, argv)
        strategies.register()
        environment.keep_memory()
        torch.backends.cudnn.allow_tf32 = False  # float32 means float32
        yield run


def load_data(config: Namespace) -> InMemoryData:
    """Build the chosen data module and set it up, rank zero first; limit threads to what its inputs need."""
    teacher, options = vars(config).get("teacher"), config.data.init_args
    if vars(config).get(TOKENIZER) is not None:  # then a student's weights tell the tokens
        teacher = vars(config).get("student")
    if isinstance(teacher, cli.Choice) and options.get("tokenizer", "") is None:
        net_class = teacher.target
        if issubclass(net_class, Net):
            options["tokenizer"] = net_class.tokenizer_from(teacher.init_args)
    data = cli.build(config.data, "data")
    if not isinstance(data, InMemoryData):
        data = DataModuleAdapter(data, config.num_classes)
    elif config.num_classes is not None:
        raise BadInput(
            "num_classes", config.num_classes, f"not allowed with `data {config.data.name}`, which knows its classes"
        )
    with launch.main_first("data"):
        data.prepare_data()
        data.setup()
    environment.limit_threads(data.input_shape)
    return data


def _check_inputs(out: Path, settings: dict[str, Any], seed: int) -> None:
    """Raise BadInput if a setting names a file, or a folder of files, that would be deleted before it is read."""
    inside = {place for path in list_recorded(out) for place in (path, *path.parents)} - {out, *out.parents}
    deleted = {place.absolute() for place in inside}
    for flag, value in settings.items():
        if isinstance(value, str):
            path = os.path.abspath(value.replace("{seed}", str(seed)))  # noqa: PTH100 - Path keeps ..
            if Path(path) in deleted:
                expected = f"`{flag}` outside of {out}, the files of which are deleted first; it is {value}"
                raise BadInput("overwrite", "true", expected)
