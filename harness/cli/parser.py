"""The command line of an experiment, in two passes: which classes are chosen, then the options of each."""

import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeAlias

import yaml

from apprentice.errors import BadInput
from harness.cli import rows, training, usage
from harness.cli.choices import Resolver
from harness.cli.classes import Choice, Classes, arguments, build, imported, plain
from harness.cli.messages import near
from harness.cli.modules import working_directory_first
from harness.cli.options import RunOptions
from harness.cli.resuming import CALL, FIXED, FREE, Change, OnResume, check_same
from harness.cli.signatures import Signature, Texts
from harness.cli.sources import Given, Layer, as_given, flat, from_yaml, layer, load, read

Bases: TypeAlias = type | tuple[type, ...]


@dataclass
class Entry:
    """A key of the command line at which a class is chosen."""

    classes: Classes
    optional: bool = False  # nothing may be chosen
    named: bool = False  # there are many choices, by names of the user's own
    given: tuple[str, str] | None = None  # as `add_choice` takes it
    replaces: str | None = None  # the key of a single choice, in place of which these are


class Parser:
    """The command line of a script; `options`, a dataclass of plain options, checks its values when it is made."""

    def __init__(self, prog: str, description: str = "", options: type[RunOptions] = RunOptions) -> None:
        self.prog, self.description = prog, description
        self.options = Signature(options)
        self.entries: dict[str, Entry | Signature | Texts] = {}  # with a signature, the class is not chosen
        self._defaults: dict[str, Given] = {}
        self._more: list[tuple[str, Any, Layer]] = []  # a plain option, its value, and the defaults that it adds
        self._nested: dict[str, Classes] = {}  # what options of the Trainer choose from
        self._parsed: dict[str, Any] = {}
        self._on_resume = {field.name: field.metadata.get("on_resume", FIXED) for field in fields(options)}

    def add_choice(
        self,
        key: str,
        bases: Bases,  # what the class derives from
        package: ModuleType,  # where short names are looked up; others are import paths
        default: Any,  # short name, or class_path and init_args; None makes `null` a choice
        skip: Iterable[str] = (),  # arguments of constructors that are not options
        given: tuple[str, str] | None = None,  # an earlier choice, attribute of its class that names more to skip
    ) -> None:
        """Add `--KEY CLASS` and `--KEY.OPTION VALUE`."""
        self._add(key, Entry(_classes(bases, package, skip), default is None, given=given), default)

    def add_variants(
        self,
        key: str,
        bases: Bases,
        package: ModuleType,
        defaults: Mapping[str, Any],
        more: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),  # what plain options add to the defaults if true
        given: tuple[str, str] | None = None,  # as above
        replaces: str | None = None,  # the key of a single choice: if names are given, none is made there
    ) -> None:
        """Add `--KEY.NAME CLASS` and `--KEY.NAME.OPTION VALUE` for any name, merged into the defaults by name.

        The plain option `only`, if there is one, says which of them are wanted; see `rows`.
        """
        self._add(key, Entry(_classes(bases, package), named=True, given=given, replaces=replaces), dict(defaults))
        self._more += [(option, True, layer(dict(added), key=key)) for option, added in more.items()]

    def add_recipes(self, option: str, recipes: Mapping[Any, Mapping[str, Any]]) -> None:
        """Let a value of a plain option set many flags, each of which may be given beside it."""
        self._more += [(option, name, layer(dict(flags), f"--{option} {name}")) for name, flags in recipes.items()]

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
        **defaults: Any,
    ) -> None:
        """Add `--trainer.OPTION` for Lightning's Trainer, with options below `--trainer.strategy` and `callbacks`.

        `defaults` are in place of the Trainer's own. `logger` names others beside ours, where there are `loggers`, or
        switches ours on and off. `on_resume` says of options that results depend on how they may change.
        """
        from lightning.pytorch import Trainer

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
        """The configuration: defaults, then YAML files in their order, then flags.

        Each choice is a `Choice`, the variants a dict of them, `trainer` a `Choice` of Lightning's; plain options are
        as their dataclass has them. With `resume`, settings come from the folder's config.yaml.

        Raises:
            BadInput: naming the flag.
            SystemExit: after `--help` and `--print_config`.
        """
        working_directory_first()  # jsonargparse imports functions
        layers, bare = read(sys.argv[1:] if argv is None else argv)
        if "help" in bare:
            sys.stdout.write(self._help(layers))
            raise SystemExit(0)
        early = self._merged(layers)
        with as_given(early):
            options = Namespace(**{**self.options.defaults, **self._values(early)})  # checked together once merged
        path = Path(options.out or "") / "config.yaml"
        run = path if options.resume and options.out and path.exists() else None
        start = self._defaults if run is None else self._saved(run)
        added = self._added(options)
        if run is not None:
            added = [{flag: each for flag, each in more.items() if flag not in start} for more in added]
        given = {**self._merged([start, *added, *layers]), **self._for_any_class(added, layers)}
        with as_given(given):
            config = self._config(given)
            self._check(config)
            if run is not None:
                self._check_same(run.parent, self._config(start), config)
            elif config.resume:
                self._check_described(config.out, early)
        if "print_config" in bare:
            sys.stdout.write(self.dump(config))
            raise SystemExit(0)
        self._parsed = dict(flat(self.as_dict(config)))
        return config

    def on_resume(self, flag: str) -> OnResume:
        """What a resumed run may do with a setting: as it, or what it is an option of, declares."""
        while flag not in self._on_resume and "." in flag:
            flag = flag.rpartition(".")[0]
        return self._on_resume.get(flag, FIXED)

    @property
    def free(self) -> list[str]:
        """The flags on which no result depends, nor on the options below them."""
        return [flag for flag, rule in self._on_resume.items() if rule in {CALL, FREE}]

    def flag(self, name: str, value: str) -> str | None:
        """The only flag of what was parsed for an option of this name, or the only one that has this value too."""
        if name in self._parsed:
            return name
        named = [flag for flag in self._parsed if flag.rpartition(".")[2] == name]
        same = [flag for flag in named if str(self._parsed[flag]) == value] if len(named) > 1 else named
        return same[0] if len(same) == 1 else None

    def _merged(self, layers: Sequence[Layer]) -> Layer:
        """The first pass: what counts of the layers. Another class drops the options of the one before."""
        given: dict[str, Given] = {}
        for each in map(self._expanded, layers):
            for flag, (name, _) in each.items():
                below = {inner: found for inner, (found, _) in given.items() if inner.startswith(f"{flag}.")}
                if flag in given and below:
                    classes, old = self._chosen_at(flag), given[flag].value
                    options = {inner.removeprefix(f"{flag}."): found for inner, found in below.items()}
                    if not (name == old if classes is None else classes.same(name, old, options)):
                        given = {inner: found for inner, found in given.items() if inner not in below}
            given |= each
        return given

    def _expanded(self, given: Layer) -> Layer:
        """The layer, with flags in place of a choice that is written as a mapping in YAML."""
        inner, others = dict[str, Given](), dict[str, Given]()
        for flag, each in given.items():
            value = from_yaml(each.value, flag) if self._chosen_at(flag) else None
            if isinstance(value, dict):
                inner |= layer(value, each.source, flag)
            else:
                others[flag] = each
        return inner | others

    def _chosen_at(self, flag: str) -> Classes | None:
        """What a flag chooses from, if it chooses."""
        key, _, last = flag.rpartition(".")
        if key == "trainer":
            return self._nested.get(last)
        parent = self.entries.get(key)
        entry = parent if isinstance(parent, Entry) and parent.named else self.entries.get(flag)
        return entry.classes if isinstance(entry, Entry) else None

    def _added(self, options: Any) -> list[Layer]:
        """The defaults that plain options add."""
        return [added for option, value, added in self._more if getattr(options, option) == value]

    def _for_any_class(self, added: Sequence[Layer], layers: Sequence[Layer]) -> Layer:
        """What a recipe sets of classes that it does not choose, and that no later layer sets."""
        own, explicit = {flag: each for more in added for flag, each in more.items()}, self._merged(layers)
        return {
            flag: each
            for flag, each in own.items()
            if each.source and flag not in explicit and flag.rpartition(".")[0] not in own
        }

    def _replaced(self, given: Layer) -> tuple[Layer, list[str]]:
        """What counts where names are given in place of a single choice, and the keys at which none is made then."""
        keys: list[str] = []
        for key, entry in self.entries.items():
            names = [flag for flag in given if flag.startswith(f"{key}.")]
            if not (isinstance(entry, Entry) and entry.replaces and names):
                continue
            single = {flag: each for flag, each in given.items() if f"{flag}.".startswith(f"{entry.replaces}.")}
            for flag, (value, _) in single.items():
                if value is not None and given[flag] is not self._defaults.get(flag):
                    raise BadInput(flag, value, f"it left out: --{names[0]} is beside it, which names the nets")
            given = {flag: each for flag, each in given.items() if flag not in single}
            keys.append(entry.replaces)
        return given, keys

    def _config(self, given: Layer) -> Namespace:
        resolver, choices = self._resolved(given)
        resolver.check_complete(["config", "print_config", "help", *self.entries, *self.options.hints])
        return Namespace(**choices, **vars(self._options(given)))

    def _resolved(self, given: Layer) -> tuple[Resolver, dict[str, Any]]:
        """The second pass: choices with their options; flags may still be missing or unknown."""
        given, replaced = self._replaced(given)
        resolver, choices = Resolver(given, self.prog), dict[str, Any]()
        for key, entry in self.entries.items():
            classes = self._classes(choices)
            resolver.families = [*classes.values(), *self._nested.values()]
            if isinstance(entry, Signature):
                if key in given:
                    raise BadInput(key, given[key].value, f"an option, such as --{key}.{next(iter(entry.hints))}")
                choices[key] = Choice(entry.path, resolver.options(entry, key, {}))
            elif isinstance(entry, Texts):
                choices[key] = resolver.texts(key)
            elif entry.named:
                names = self._names(key, entry, resolver.given)
                choices[key] = {name: resolver.one(classes[key], f"{key}.{name}") for name in names}
            else:
                choices[key] = resolver.one(classes[key], key, entry.optional or key in replaced)
        return resolver, choices

    def _values(self, given: Layer) -> dict[str, Any]:
        return {name: self.options.check(name, given[name].value) for name in self.options.hints if name in given}

    def _options(self, given: Layer) -> RunOptions:
        found = self._values(given)
        options: Any = self.options.target
        return options(**{**(options.quick_values if found.get("quick") else {}), **found})

    def _names(self, key: str, entry: Entry, given: Layer) -> list[str]:
        if key in given:
            expected = f"a name and a class, as --{key}.mine {next(iter(entry.classes.known))}"
            raise BadInput(key, given[key].value, expected)
        names = list(dict.fromkeys(flag.split(".")[1] for flag in given if flag.startswith(f"{key}.")))
        for name in names:
            whole = f"{key}.{name}"
            flag = whole if whole in given else next(flag for flag in given if flag.startswith(f"{whole}."))
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or rows.is_reserved(name):
                expected = f"a name of letters, digits, _ and - after --{key}, other than {rows.RESERVED}"
                raise BadInput(flag, given[flag].value, expected)
            if flag != whole:
                known = [other for other in names if f"{key}.{other}" in given]
                others = f"one of {', '.join(known)}, or " if known else ""
                expected = f"{others}--{whole} CLASS beside it for a new one{near(name, known)}"
                raise BadInput(flag, given[flag].value, expected)
        return names

    def _classes(self, choices: Mapping[str, Any]) -> dict[str, Classes]:
        """What each key chooses from, without the arguments that other choices give."""
        found = {key: entry.classes for key, entry in self.entries.items() if isinstance(entry, Entry)}
        for key, classes in found.items():
            giver, attribute = getattr(self.entries[key], "given", None) or ("", "")
            if isinstance(choice := choices.get(giver), Choice):
                usual = getattr(found[giver].bases[0], attribute)  # other people's classes don't have it
                names = getattr(imported(choice.class_path, giver), attribute, usual)
                found[key] = replace(classes, skip=classes.skip.union(names))
        return found

    def _check(self, config: Namespace) -> None:
        """Find by trial what types can't tell."""
        for key, entry in self.entries.items():
            chosen = getattr(config, key)
            if isinstance(entry, Signature):
                arguments(chosen, key)
            elif isinstance(entry, Entry) and entry.named:
                for name, choice in chosen.items() if entry.given is None else ():
                    build(choice, f"{key}.{name}")
        if any(isinstance(entry, Entry) and entry.named for entry in self.entries.values()):
            rows.rows(config)
        trainer = config.trainer.init_args if "trainer" in self.entries else {}
        training.check_trainer(trainer)
        if "optimizer" in self.entries:
            training.check_optimizer(config.optimizer, config.scheduler, trainer.get("max_epochs") or 1)

    def _saved(self, path: Path) -> Layer:
        saved = load(path, "out")
        needed = [key for key in self.entries if not self._is_empty(key)]
        needed += [name for name in self.options.hints if self.on_resume(name) is not CALL]
        missing = [key for key in needed if key not in saved]
        if missing or not path.read_text("utf-8").endswith("\n"):
            what = f"{missing[0]} is missing" if missing else "its last line is cut off"
            raise BadInput("out", path, f"all settings of the run; {what}")
        return layer(saved, str(path))

    def _check_described(self, out: str, given: Layer) -> None:
        """Raise BadInput where there is no run to go on with, and no setting describes a new one."""
        if all(self.on_resume(flag).change is not Change.NONE for flag in given):
            expected = "the folder of a run to go on with; there is no config.yaml in it, and no setting for a new run"
            raise BadInput("out", out, expected)

    def _check_same(self, folder: Path, saved: Namespace, config: Namespace) -> None:
        """Raise BadInput if a setting differs on which the results of that run depend and by which it can't grow."""
        before, after = (dict(flat(self.as_dict(each))) for each in (saved, config))
        new: list[str] = []
        for key, entry in self.entries.items():
            if not (isinstance(entry, Entry) and entry.named):
                continue
            used, wanted = (rows.used(each, key) for each in (saved, config))
            new += [f"{key}.{name}" for name in getattr(config, key) if name not in used]
            added = {flag.split(".")[1] for more in self._added(config) for flag in more if flag.startswith(f"{key}.")}
            for name, choice in getattr(config, key).items():
                if name not in {*getattr(saved, key), *wanted, *added}:
                    expected = f"{name} in --only, too: the run in {folder} is of {', '.join(used)}"
                    raise BadInput(f"{key}.{name}", choice.name, expected)
        check_same(before, after, folder, self.on_resume, new)

    def summary(self, config: Namespace) -> str:
        """What is chosen but for the optimizer, in one line: `data Digits, teacher DeepNN, variants ce kd, seed 0`."""
        shown = {}
        for key, entry in self.entries.items():
            chosen = getattr(config, key)
            if isinstance(entry, Entry) and key not in {"optimizer", "scheduler"} and chosen:
                shown[key] = " ".join(rows.used(config, key)) if entry.named else chosen.name
        seeds = config.seeds if len(config.seeds) < 10 else [*config.seeds[:3], "...", config.seeds[-1]]
        shown["seeds" if len(seeds) > 1 else "seed"] = " ".join(map(str, seeds))
        return ", ".join(f"{key} {what}" for key, what in shown.items())

    def as_dict(self, config: Namespace) -> dict[str, Any]:
        """The configuration as YAML and JSON have it."""
        found = {key: getattr(config, key) for key in self.entries}
        choices = {key: plain(each) for key, each in found.items() if each or not self._is_empty(key)}
        only = {key: choices[key]["init_args"] for key, entry in self.entries.items() if isinstance(entry, Signature)}
        options = {name: self.options.plain(name, getattr(config, name)) for name in self.options.hints}
        return choices | only | options

    def dump(self, config: Namespace, of_run: bool = False) -> str:
        """The configuration as YAML, `of_run` without what is of one call; as `--config` it gives the same again."""
        settings = self.as_dict(config).items()
        kept = {key: value for key, value in settings if not (of_run and self.on_resume(key) is CALL)}
        return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)

    def _is_empty(self, key: str) -> bool:
        """Whether a key has names of the user's own only: without any, settings are written without the key."""
        entry = self.entries[key]
        named = isinstance(entry, Texts) or (isinstance(entry, Entry) and entry.named)
        return named and not any(flag.startswith(f"{key}.") for flag in self._defaults)

    def _help(self, layers: Sequence[Layer]) -> str:
        try:
            resolver = self._resolved(self._merged([self._defaults, *layers]))[0]
        except BadInput:
            resolver = self._resolved(self._defaults)[0]
        return usage.text(self, resolver.flags, self._nested)


def _classes(bases: Bases, package: ModuleType, skip: Iterable[str] = ()) -> Classes:
    return Classes(bases if isinstance(bases, tuple) else (bases,), package, frozenset(skip))
