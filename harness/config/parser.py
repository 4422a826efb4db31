"""A parser: what the command line has, and how flags, files and an earlier run become one configuration."""

import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import yaml

from apprentice.errors import BadInput
from harness.config import optimizers, usage
from harness.config.building import arguments, build
from harness.config.choices import Catalogue, Family, leaf
from harness.config.entries import Entry, Fixed, Many, One
from harness.config.imports import imported
from harness.config.layers import Layer, as_given, layers_of
from harness.config.options import RunOptions
from harness.config.settings import INVOCATION, flat, free
from harness.config.signatures import Options, near
from harness.config.sources import BARE, flags, load
from harness.config.strategy_names import Names, Strategies
from harness.config.trainer import check_trainer
from harness.runs import folders
from harness.runs.files import write_text

T = TypeVar("T")
# Arguments of the Trainer that the experiment sees to.
OWNED = frozenset({
    "barebones", "default_root_dir", "enable_autolog_hparams", "enable_checkpointing", "fast_dev_run", "inference_mode",
    "limit_predict_batches", "model_registry", "overfit_batches", "reload_dataloaders_every_n_epochs", "sync_batchnorm",
    "use_distributed_sampler",
})  # fmt: skip


class Parser:
    """The command line of an experiment.

    Args:
        prog: the script's name.
        description: what it does, the head of its help.
        options: a dataclass of plain options, which checks its values when it is made.
    """

    def __init__(self, prog: str, description: str = "", options: type[RunOptions] = RunOptions) -> None:
        self.prog, self.description = prog, description
        self.options = Options(options)
        self.entries: dict[str, Entry] = {}
        self.catalogue = Catalogue()
        self._given: list[tuple[Family, str, str]] = []
        self._parsed: dict[str, Any] = {}

    # What there is

    def add_choice(
        self,
        key: str,
        bases: type | tuple[type, ...],
        package: ModuleType,
        default: Any,
        skip: Iterable[str] = (),
        optional: bool = False,
        given: tuple[str, str] | None = None,
    ) -> None:
        """Add `--KEY CLASS` and `--KEY.OPTION VALUE`.

        Args:
            key: name in the configuration.
            bases: what the class derives from.
            package: where short names are looked up; others are import paths.
            default: short name, or class_path and init_args.
            skip: arguments of constructors that are no options.
            optional: whether `null` is a choice.
            given: key of a choice that was added before, and the attribute in which the class chosen there has the
                names of more arguments that are no options.
        """
        family = _family(bases, package, skip)
        if given is not None:
            self._given.append((family, *given))
        self._add(key, One(family, default, optional))

    def add_variants(
        self,
        key: str,
        bases: type | tuple[type, ...],
        package: ModuleType,
        defaults: Mapping[str, Any],
        only: str = "only",
    ) -> None:
        """Add `--KEY.NAME CLASS` and `--KEY.NAME.OPTION VALUE` for any name, merged into the defaults by name.

        `only` is the plain option that says which of them are wanted, if there is one.
        """
        self._add(key, Many(_family(bases, package), dict(defaults), only))

    def add_optimizer(self, default: Any = "Adam") -> None:
        """Add `--optimizer` and `--scheduler`: torch's classes, tried out on a dummy net when parsed."""
        self._add("optimizer", One(optimizers.optimizers(), default))
        self._add("scheduler", One(optimizers.schedulers(), None, optional=True))

    def add_class(self, key: str, target: type, skip: Iterable[str] = (), **defaults: Any) -> None:
        """Add `--KEY.OPTION VALUE`, the options of one class.

        Args:
            key: name in the configuration.
            target: the class.
            skip: arguments of its constructor that are no options.
            defaults: those that are other than its own.
        """
        self._add(key, Fixed(f"{target.__module__}.{target.__qualname__}", Options(target, skip), defaults))

    def add_trainer(self, strategies: Names, **defaults: Any) -> None:
        """Add `--trainer.OPTION` for Lightning's Trainer, with its options below `--trainer.strategy` and `callbacks`.

        Args:
            strategies: the project's own by short name, each with the options that the name sets.
            defaults: the Trainer's that are other than its own; `logger` only switches ours on and off.
        """
        from lightning.pytorch import Callback, Trainer, callbacks

        types = {"logger": bool, "devices": int | list[int] | str}
        self.catalogue.families += [Family((Callback,), callbacks), Strategies(names=strategies)]
        options = Options(Trainer, OWNED, types)
        self._add("trainer", Fixed("lightning.pytorch.Trainer", options, {"logger": True, **defaults}))

    def _add(self, key: str, entry: Entry) -> None:
        self.entries[key] = entry
        if isinstance(entry, One | Many):
            self.catalogue.families.append(entry.family)

    # Parsing

    def parse(self, argv: Sequence[str] | None = None) -> Namespace:
        """The configuration: defaults, then YAML files in their order, then flags.

        Each choice is a `Choice`, the variants a dict of them, `trainer` a `Choice` of Lightning's; plain options are
        as their dataclass has them. With `resume`, settings come from the folder's config.yaml.

        Raises:
            BadInput: naming the flag.
            SystemExit: after `--help` and `--print_config`.
        """
        given = flags(sys.argv[1:] if argv is None else argv)
        bare = {name for name in BARE if given.pop(name, False)}
        if "help" in bare:
            sys.stdout.write(self._help(given))
            raise SystemExit(0)
        layers = layers_of(given)
        run = self._run_to_resume(layers)
        start = self._start() if run is None else self._saved(run)
        with as_given(layers):
            config = self._finished(self._changed(start, layers))
            self._check(config)
            if run is not None:
                self._check_same(run, start, config)
        if "print_config" in bare:
            sys.stdout.write(self.dump(config))
            raise SystemExit(0)
        self._parsed = dict(flat(self.as_dict(config)))
        return config

    def flag(self, name: str, value: str) -> str | None:
        """The only flag of what was parsed for an option of this name, or the only one that has this value too."""
        if name in self._parsed:
            return name
        named = [flag for flag in self._parsed if flag.rpartition(".")[2] == name]
        same = [flag for flag in named if str(self._parsed[flag]) == value] if len(named) > 1 else named
        return same[0] if len(same) == 1 else None

    def _start(self) -> dict[str, Any]:
        start: dict[str, Any] = {}
        for key, entry in self.entries.items():
            start[key] = entry.start(self.catalogue, key)
            self._give(start)
        return {**start, **self.options.defaults}

    def _changed(self, settings: dict[str, Any], layers: Iterable[Layer]) -> dict[str, Any]:
        settings, layers = dict(settings), list(layers)
        givers = {giver for _, giver, _ in self._given}
        for first in (True, False):
            for layer in layers:
                with as_given([layer]):
                    for key, given in layer.given.items():
                        if (key in givers) is first:
                            settings[key] = self._change(settings, key, given)
            self._give(settings)
        return settings

    def _give(self, settings: Mapping[str, Any]) -> None:
        """Tell families what is no option beside these settings."""
        for family, giver, attribute in self._given:
            if giver in settings:
                family.given.clear()
                family.given.update(getattr(imported(settings[giver].class_path, giver), attribute))

    def _change(self, settings: dict[str, Any], key: str, given: Any) -> Any:
        if key in self.entries:
            return self.entries[key].change(self.catalogue, settings[key], given, key)
        if key in self.options and not isinstance(given, dict):
            return self.options.check(key, given)
        flag, value = leaf(key, given)
        hint = near(flag, self._flags(settings), "--") or "; --help lists them"
        raise BadInput(flag, value, f"a flag of {self.prog}{hint}")

    def _flags(self, settings: Mapping[str, Any]) -> list[str]:
        plain = {key: entry.plain(self.catalogue, settings[key]) for key, entry in self.entries.items()}
        return ["config", "print_config", "help", *self.entries, *self.options, *(flag for flag, _ in flat(plain))]

    def _finished(self, settings: Mapping[str, Any]) -> Namespace:
        for key, entry in self.entries.items():
            entry.check(self.catalogue, settings[key], key)
        plain = self.options.target(**{name: settings[name] for name in self.options})
        return Namespace(**{key: settings[key] for key in self.entries}, **vars(plain))

    def _check(self, config: Namespace) -> None:
        """Find by trial what types can't tell."""
        for key, entry in self.entries.items():
            chosen = getattr(config, key)
            if isinstance(entry, Fixed):
                arguments(chosen, key)
            if key == "trainer":
                check_trainer(chosen.init_args)
            if isinstance(entry, Many):
                for name, choice in chosen.items():
                    build(choice, f"{key}.{name}")
                pick(chosen, getattr(config, entry.only, None), entry.only)
        if "optimizer" in self.entries:
            epochs = config.trainer.init_args["max_epochs"] if "trainer" in self.entries else None
            optimizers.try_out(config.optimizer, config.scheduler, min(epochs or 1, 1000))

    # Going on

    def _run_to_resume(self, layers: Sequence[Layer]) -> Path | None:
        """The settings of the run to go on with, if that is wanted and there is one."""
        plain = [
            Layer({key: v for key, v in given.items() if key in self.options and not isinstance(v, dict)}, source)
            for given, source in layers
        ]
        settings = self._changed(self.options.defaults, plain)
        with as_given(layers):
            options = self.options.target(**settings)
        if not options.resume:
            return None
        out = Path(options.out or "")
        path, found = out / "config.yaml", folders.holds(out)
        if found and not path.exists():
            raise BadInput(
                "resume", "true", f"config.yaml in {out}, which holds {found[0]} of a run with unknown settings"
            )
        return path if found else None

    def _saved(self, path: Path) -> dict[str, Any]:
        """The settings of that run, whatever the defaults are now."""
        start, saved = self._start(), load(path, "out")
        missing = [key for key in start if key not in {*saved, *INVOCATION}]
        if missing or not path.read_text("utf-8").endswith("\n"):
            what = f"{missing[0]} is missing" if missing else "its last line is cut off"
            raise BadInput("out", path, f"all settings of the run; {what}")
        start |= {key: {} for key, entry in self.entries.items() if isinstance(entry, Many)}
        return self._changed(start, [Layer(saved, str(path))])

    def _check_same(self, path: Path, saved: Mapping[str, Any], config: Namespace) -> None:
        """Raise BadInput if anything differs from that run on which its results depend."""
        before, after = (dict(flat(self.as_dict(each))) for each in (self._finished(saved), config))
        for flag in [*after, *before]:
            was, now = before.get(flag, "(nothing)"), after.get(flag, "(nothing)")
            if (was != now or type(was) is not type(now)) and not free(flag):  # 1 batch is not 1.0 of all
                raise BadInput(
                    flag, now, f"{was}, as the run in {path.parent} was started; leave it out, or take another --out"
                )

    # Writing

    def as_dict(self, config: Namespace) -> dict[str, Any]:
        """The configuration as YAML and JSON have it."""
        choices = {key: entry.plain(self.catalogue, getattr(config, key)) for key, entry in self.entries.items()}
        return {**choices, **{name: self.options.plain(name, getattr(config, name)) for name in self.options}}

    def dump(self, config: Namespace, skip: Iterable[str] = ()) -> str:
        """The whole configuration as YAML; given as `--config`, it gives the same again."""
        plain = {key: value for key, value in self.as_dict(config).items() if key not in skip}
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)

    def save(self, config: Namespace, path: str | Path) -> None:
        """Write the YAML that repeats the experiment; where it is kept and how it was called are not part of it."""
        write_text(path, self.dump(config, INVOCATION))

    def _help(self, given: dict[str, Any]) -> str:
        """The help, with the options of the classes that are chosen beside it."""
        try:
            settings = self._changed(self._start(), layers_of(given))
        except BadInput:
            settings = self._start()
        return usage.text(self, settings)


def pick(variants: Mapping[str, T], only: Sequence[str] | None, flag: str = "only") -> dict[str, T]:
    """The variants that are wanted, in their own order; all if that is not said.

    Raises:
        BadInput: one of the names is unknown.
    """
    if only is None:
        return dict(variants)
    for name in only:
        if name not in variants:
            raise BadInput(flag, name, f"names among {', '.join(variants)}{near(name, variants)}")
    if not only:
        raise BadInput(flag, "[]", f"at least one of {', '.join(variants)}")
    return {name: variant for name, variant in variants.items() if name in only}


def _family(bases: type | tuple[type, ...], package: ModuleType, skip: Iterable[str] = ()) -> Family:
    return Family(bases if isinstance(bases, tuple) else (bases,), package, frozenset(skip))
