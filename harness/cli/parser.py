"""The command line of an experiment, in two passes: which classes are chosen, then the options of each."""

import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeAlias

import yaml

from apprentice.errors import BadInput
from harness.cli import rows, training, usage
from harness.cli.choices import Resolver
from harness.cli.classes import Choice, Classes, arguments, build, import_class, plain
from harness.cli.merging import below, merge, settings_of_any_class
from harness.cli.messages import near
from harness.cli.modules import put_working_directory_first
from harness.cli.options import RunOptions
from harness.cli.resuming import CALL, FIXED, FREE, Change, OnResume, check_same, rules_of
from harness.cli.signatures import Signature, Texts
from harness.cli.sources import Layer, Setting, as_written, flat, layer, load, read

ONLY_ONE = ("trainer.strategy", "trainer", "data")  # of these objects a run has one
Bases: TypeAlias = type | tuple[type, ...]


@dataclass
class Entry:
    """A key of the command line at which a class is chosen."""

    classes: Classes
    optional: bool = False  # nothing may be chosen
    named: bool = False  # there are many choices, by names of the user's own
    fixed_by: tuple[str, str] | None = None  # as `add_choice` takes it
    replaces: str | None = None  # the key of a single choice, in place of which these are


class Parser:
    """The command line of a script; `options`, a dataclass of plain options, checks its values when it is made."""

    def __init__(self, prog: str, description: str = "", options: type[RunOptions] = RunOptions) -> None:
        self.prog, self.description = prog, description
        self.options = Signature(options)
        self.entries: dict[str, Entry | Signature | Texts] = {}  # with a signature, the class is not chosen
        self._defaults: dict[str, Setting] = {}
        self._added: list[tuple[str, Any, Layer]] = []  # a plain option, its value, and the defaults that it adds
        self.idle = {*options.idle}  # flags that do nothing in this script
        if options.why_inexact:
            self.idle.add("exact")
        self._nested: dict[str, Classes] = {}  # what options of the Trainer choose from
        self._parsed: dict[str, Any] = {}
        self._on_resume = rules_of(options)

    def add_choice(
        self,
        key: str,
        bases: Bases,  # what the class derives from
        package: ModuleType,  # where short names are looked up; others are import paths
        default: Any,  # short name, or class_path and init_args; None makes `null` a choice
        skip: Iterable[str] = (),  # arguments of constructors that are not options
        fixed_by: tuple[str, str] | None = None,  # an earlier choice, attribute of its class that names more to skip
    ) -> None:
        """Add `--KEY CLASS` and `--KEY.OPTION VALUE`."""
        self._add(key, Entry(_classes(bases, package, skip), default is None, fixed_by=fixed_by), default)

    def add_variants(
        self,
        key: str,
        bases: Bases,
        package: ModuleType,
        defaults: Mapping[str, Any],
        additions: Mapping[str, Mapping[str, Any]] = MappingProxyType(
            {}
        ),  # what plain options add to the defaults if true
        fixed_by: tuple[str, str] | None = None,  # as above
        replaces: str | None = None,  # the key of a single choice: if names are given, none is made there
    ) -> None:
        """Add `--KEY.NAME CLASS` and `--KEY.NAME.OPTION VALUE` for any name, merged into the defaults by name.

        The plain option `only`, if there is one, says which of them are wanted; see `rows`.
        """
        entry = Entry(_classes(bases, package), named=True, fixed_by=fixed_by, replaces=replaces)
        self._add(key, entry, dict(defaults))
        self._added += [(option, True, layer(dict(added), key=key)) for option, added in additions.items()]

    def add_recipes(self, option: str, recipes: Mapping[Any, Mapping[str, Any]]) -> None:
        """Let a value of a plain option set many flags, each of which may be given beside it."""
        self._added += [(option, name, layer(dict(flags), f"--{option} {name}")) for name, flags in recipes.items()]

    def add_optimizer(self, default: Any = "Adam", scheduler_on_resume: OnResume = FIXED) -> None:
        """Add `--optimizer` and `--scheduler`: torch's classes, tried out on a dummy net when parsed."""
        self._on_resume["scheduler"] = scheduler_on_resume
        self._add("optimizer", Entry(training.OPTIMIZERS), default)
        self._add("scheduler", Entry(training.SCHEDULERS, optional=True), None)

    def add_class(self, key: str, target: type, skip: Iterable[str] = ()) -> None:
        """Add `--KEY.OPTION VALUE`, the options of one class but for those to skip."""
        self._add(key, Signature(target, skip), {})

    def add_texts(self, key: str, about: str) -> None:
        """Add `--KEY.NAME.OPTION VALUE` for any names; the configuration has the values by what follows the key."""
        self._add(key, Texts(about), {})

    def add_trainer(
        self,
        strategies: training.Names,
        *,
        loggers: bool = True,
        on_resume: Mapping[str, OnResume] = MappingProxyType({}),
        idle: Iterable[str] = (),
        **defaults: Any,
    ) -> None:
        """Add `--trainer.OPTION` for Lightning's Trainer, with options below `--trainer.strategy` and `callbacks`.

        `defaults` are in place of the Trainer's own. `logger` names others beside ours, where there are `loggers`, or
        switches ours on and off. `on_resume` says of options that results depend on how they may change;
        `idle` are options that do nothing here.
        """
        from lightning.pytorch import Trainer

        self.idle |= {f"trainer.{name}" for name in idle}
        rules = {**dict.fromkeys(training.ANY_ON_RESUME, FREE), **on_resume}
        self._on_resume |= {f"trainer.{name}": rule for name, rule in rules.items()}
        self._nested = {"callbacks": training.CALLBACKS, "strategy": training.Strategies(names=strategies)}
        types = {**training.TYPES, "logger": bool}
        if loggers:
            self._nested["logger"], types = training.Loggers(), training.TYPES
        self._add("trainer", Signature(Trainer, training.OWNED, types), {"logger": True, **defaults})

    def _add(self, key: str, entry: Entry | Signature | Texts, default: Any) -> None:
        self.entries[key] = entry
        self._defaults |= layer(default, key=key)

    def parse(self, argv: Sequence[str] | None = None) -> Namespace:
        """Read the configuration: defaults, then YAML files in their order, then flags.

        Each choice is a `Choice`, the variants a dict of them, `trainer` a `Choice` of Lightning's; plain options are
        as their dataclass has them. With `resume`, settings come from the folder's config.yaml.

        Raises:
            BadInput: naming the flag.
            SystemExit: after `--help` and `--print_config`.
        """
        put_working_directory_first()  # jsonargparse imports functions
        layers, bare = read(sys.argv[1:] if argv is None else argv)
        if "help" in bare:
            sys.stdout.write(self._help(layers))
            raise SystemExit(0)
        early = merge(layers, self._classes_at)
        with as_written(early):
            options = Namespace(**{**self.options.defaults, **self._values(early)})  # checked together once merged
        path = Path(options.out or "") / "config.yaml"
        run = path if options.resume and options.out and path.exists() else None
        start = self._defaults if run is None else self._read_saved(run)
        added = self._find_added(options)
        if run is not None:
            added = [{flag: new for flag, new in settings.items() if flag not in start} for settings in added]
        settings = merge([start, *added, *layers], self._classes_at)
        settings |= settings_of_any_class(added, layers, self._classes_at)
        with as_written(settings):
            config = self._config(settings)
            self._check(config)
            if run is not None:
                self._check_same(run.parent, self._config(start), config)
            elif config.resume:
                self._check_new(config.out, early)
        if "print_config" in bare:
            sys.stdout.write(self.dump(config))
            raise SystemExit(0)
        self._parsed = dict(flat(self.as_dict(config)))
        return config

    def on_resume(self, flag: str) -> OnResume:
        """Return how a resumed run may change a setting, as it or the class that it belongs to declares."""
        while flag not in self._on_resume and "." in flag:
            flag = flag.rpartition(".")[0]
        return self._on_resume.get(flag, FIXED)

    @property
    def free(self) -> list[str]:
        """The flags on which no result depends, nor on the options below them."""
        return [flag for flag, rule in self._on_resume.items() if rule in {CALL, FREE}]

    def flag_of(self, argument: str) -> str | None:
        """Find the flag of an argument that an object refused: the argument, or the only flag that ends with it."""
        places = [argument, *(f"{owner}.{argument}" for owner in ONLY_ONE)]
        endings = [flag for flag in self._parsed if flag.endswith(f".{argument}")]
        return next((flag for flag in places if flag in self._parsed), endings[0] if len(endings) == 1 else None)

    def _classes_at(self, flag: str) -> Classes | None:
        """Return what a flag chooses from, if it chooses."""
        key, _, last = flag.rpartition(".")
        if key == "trainer":
            return self._nested.get(last)
        parent = self.entries.get(key)
        entry = parent if isinstance(parent, Entry) and parent.named else self.entries.get(flag)
        return entry.classes if isinstance(entry, Entry) else None

    def _find_added(self, options: Any) -> list[Layer]:
        """Return the defaults that plain options add."""
        return [settings for option, value, settings in self._added if getattr(options, option) == value]

    def _drop_replaced(self, settings: Layer) -> tuple[Layer, list[str]]:
        """Drop a single choice in whose place names are set. Return the other settings, and the keys of dropped ones.

        Raises:
            BadInput: the single choice is set, too.
        """
        keys: list[str] = []
        for key, entry in self.entries.items():
            names = [flag for flag in settings if flag.startswith(f"{key}.")]
            if not (isinstance(entry, Entry) and entry.replaces and names):
                continue
            single = {flag: value for flag, value in settings.items() if f"{flag}.".startswith(f"{entry.replaces}.")}
            for flag, (value, _) in single.items():
                if value is not None and settings[flag] is not self._defaults.get(flag):
                    raise BadInput(flag, value, f"it left out: --{names[0]} is beside it, which names the nets")
            settings = {flag: value for flag, value in settings.items() if flag not in single}
            keys.append(entry.replaces)
        return settings, keys

    def _config(self, settings: Layer) -> Namespace:
        resolver, choices = self._resolve(settings)
        resolver.check_complete(["config", "print_config", "help", *self.entries, *self.options.hints])
        return Namespace(**choices, **vars(self._options(settings)))

    def _resolve(self, settings: Layer) -> tuple[Resolver, dict[str, Any]]:
        """Do the second pass: choices with their options; flags may still be missing or unknown."""
        settings, replaced = self._drop_replaced(settings)
        resolver, choices = Resolver(settings, self.prog), dict[str, Any]()
        for key, entry in self.entries.items():
            classes = self._classes(choices)
            resolver.families = [*classes.values(), *self._nested.values()]
            if isinstance(entry, Signature):
                if key in settings:
                    raise BadInput(key, settings[key].value, f"an option, such as --{key}.{next(iter(entry.hints))}")
                choices[key] = Choice(entry.path, resolver.options(entry, key, {}))
            elif isinstance(entry, Texts):
                choices[key] = resolver.texts(key)
            elif entry.named:
                names = self._names(key, entry, resolver.settings)
                choices[key] = {name: resolver.one(classes[key], f"{key}.{name}") for name in names}
            else:
                choices[key] = resolver.one(classes[key], key, entry.optional or key in replaced)
        return resolver, choices

    def _values(self, settings: Layer) -> dict[str, Any]:
        return {name: self.options.check(name, settings[name].value) for name in self.options.hints if name in settings}

    def _options(self, settings: Layer) -> RunOptions:
        values = self._values(settings)
        options: Any = self.options.target
        return options(**{**(options.quick_values if values.get("quick") else {}), **values})

    def _names(self, key: str, entry: Entry, settings: Layer) -> list[str]:
        if key in settings:
            expected = f"a name and a class, as --{key}.mine {next(iter(entry.classes.by_name))}"
            raise BadInput(key, settings[key].value, expected)
        names = list(dict.fromkeys(name.split(".")[0] for name in below(key, settings)))
        for name in names:
            whole = f"{key}.{name}"
            flag = whole if whole in settings else f"{whole}.{next(iter(below(whole, settings)))}"
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or rows.is_reserved(name):
                expected = f"a name of letters, digits, _ and - after --{key}, other than {rows.RESERVED}"
                raise BadInput(flag, settings[flag].value, expected)
            if flag != whole:
                chosen = [other for other in names if f"{key}.{other}" in settings]
                others = f"one of {', '.join(chosen)}, or " if chosen else ""
                expected = f"{others}--{whole} CLASS beside it for a new one{near(name, chosen)}"
                raise BadInput(flag, settings[flag].value, expected)
        return names

    def _classes(self, choices: Mapping[str, Any]) -> dict[str, Classes]:
        """Return what each key chooses from, without the arguments that other choices give."""
        classes = {}
        for key, entry in self.entries.items():
            if isinstance(entry, Entry):
                classes[key] = replace(entry.classes, skip=entry.classes.skip.union(self._list_fixed(entry, choices)))
        return classes

    def _list_fixed(self, entry: Entry, choices: Mapping[str, Any]) -> Iterable[str]:
        """Return the arguments that another choice gives."""
        giver, attribute = entry.fixed_by or ("", "")
        choice, base = choices.get(giver), self.entries.get(giver)
        if not (isinstance(choice, Choice) and isinstance(base, Entry)):
            return ()
        usual = getattr(base.classes.bases[0], attribute)  # other people's classes don't have it
        names: Iterable[str] = getattr(import_class(choice.class_path, giver), attribute, usual)
        return names

    def _check(self, config: Namespace) -> None:
        """Find by trial what types can't tell."""
        for key, entry in self.entries.items():
            chosen = getattr(config, key)
            if isinstance(entry, Signature):
                arguments(chosen, key)
            elif isinstance(entry, Entry) and entry.named and entry.fixed_by is None:
                for name, choice in chosen.items():
                    build(choice, f"{key}.{name}")
        if any(isinstance(entry, Entry) and entry.named for entry in self.entries.values()):
            rows.rows(config)
        trainer = config.trainer.init_args if "trainer" in self.entries else {}
        training.check_trainer(trainer)
        if "optimizer" in self.entries:
            training.check_optimizer(config.optimizer, config.scheduler, trainer.get("max_epochs") or 1)

    def _read_saved(self, path: Path) -> Layer:
        saved = load(path, "out")
        needed = [key for key in self.entries if not self._is_empty(key)]
        needed += [name for name in self.options.hints if self.on_resume(name) is not CALL]
        missing = [key for key in needed if key not in saved]
        if missing or not path.read_text("utf-8").endswith("\n"):
            what = f"{missing[0]} is missing" if missing else "its last line is cut off"
            raise BadInput("out", path, f"all settings of the run; {what}")
        return layer(saved, str(path))

    def _check_new(self, out: str, settings: Layer) -> None:
        """Raise BadInput where there is no run to go on with, and no setting describes a new one."""
        if all(self.on_resume(flag).change is not Change.NONE for flag in settings):
            expected = "the folder of a run to go on with; there is no config.yaml in it, and no setting for a new run"
            raise BadInput("out", out, expected)

    def _check_same(self, folder: Path, saved: Namespace, config: Namespace) -> None:
        """Raise BadInput if a setting differs on which the results of that run depend and by which it can't grow."""
        before, after = dict(flat(self.as_dict(saved))), dict(flat(self.as_dict(config)))
        new: list[str] = []
        for key, entry in self.entries.items():
            if not (isinstance(entry, Entry) and entry.named):
                continue
            used, needed = rows.list_used(saved, key), rows.list_used(config, key)
            new += [f"{key}.{name}" for name in getattr(config, key) if name not in used]
            added = {name.split(".")[0] for settings in self._find_added(config) for name in below(key, settings)}
            for name, choice in getattr(config, key).items():
                if name not in {*getattr(saved, key), *needed, *added}:
                    expected = f"{name} in --only, too: the run in {folder} is of {', '.join(used)}"
                    raise BadInput(f"{key}.{name}", choice.name, expected)
        check_same(before, after, folder, self.on_resume, new)

    def summary(self, config: Namespace) -> str:
        """Name all choices but the optimizer in one line: `data Digits, teacher DeepNN, variants ce kd, seed 0`."""
        parts = {}
        for key, entry in self.entries.items():
            chosen = getattr(config, key)
            if isinstance(entry, Entry) and key not in {"optimizer", "scheduler"} and chosen:
                parts[key] = " ".join(rows.list_used(config, key)) if entry.named else chosen.name
        seeds = config.seeds if len(config.seeds) < 10 else [*config.seeds[:3], "...", config.seeds[-1]]
        parts["seeds" if len(seeds) > 1 else "seed"] = " ".join(map(str, seeds))
        return ", ".join(f"{key} {what}" for key, what in parts.items())

    def as_dict(self, config: Namespace) -> dict[str, Any]:
        """Return the configuration as YAML and JSON have it."""
        chosen = {key: getattr(config, key) for key in self.entries}
        choices = {key: plain(choice) for key, choice in chosen.items() if choice or not self._is_empty(key)}
        only = {key: choices[key]["init_args"] for key, entry in self.entries.items() if isinstance(entry, Signature)}
        options = {name: self.options.plain(name, getattr(config, name)) for name in self.options.hints}
        return choices | only | options

    def dump(self, config: Namespace, of_run: bool = False) -> str:
        """Write the configuration as YAML for `--config`; `of_run` leaves out options of a single call."""
        settings = self.as_dict(config).items()
        kept = {key: value for key, value in settings if not (of_run and self.on_resume(key) is CALL)}
        return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)

    def _is_empty(self, key: str) -> bool:
        """Return whether a key has names of the user's own only: without any, settings are written without the key."""
        entry = self.entries[key]
        named = isinstance(entry, Texts) or (isinstance(entry, Entry) and entry.named)
        return named and not any(flag.startswith(f"{key}.") for flag in self._defaults)

    def _help(self, layers: Sequence[Layer]) -> str:
        try:
            resolver = self._resolve(merge([self._defaults, *layers], self._classes_at))[0]
        except BadInput:
            resolver = self._resolve(self._defaults)[0]
        return usage.text(self, resolver.flags, self._nested)


def _classes(bases: Bases, package: ModuleType, skip: Iterable[str] = ()) -> Classes:
    return Classes(bases if isinstance(bases, tuple) else (bases,), package, frozenset(skip))
