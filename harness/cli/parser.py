"""The command line of an experiment, in two passes: which classes are chosen, then the options of each."""

import sys
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from apprentice.errors import BadInput
from harness.cli import usage
from harness.cli.classes import Choice, Classes, arguments, build, plain, put_working_directory_first
from harness.cli.declarations import Declarations
from harness.cli.messages import as_flags, near_flag
from harness.cli.resolver import Resolver
from harness.cli.resuming import CALL, FREE, LEFT, NOTHING, check_same, earlier_values
from harness.cli.signatures import options_of
from harness.cli.sources import (
    WITHOUT_VALUE,
    FlagValue,
    Layer,
    as_written,
    below,
    flat,
    layer,
    load,
    merge,
    read,
    read_value,
    recipe,
)

ONLY_ONE = ("trainer.strategy", "trainer", "data")  # of these objects a run has one


class Parser(Declarations):
    """The command line of a script."""

    _parsed: Namespace | None = None
    _given: Layer = MappingProxyType({})  # what the user set in files and flags
    _of_run: Layer = MappingProxyType({})  # what the run that goes on has set; empty for a new one

    def parse(self, argv: Sequence[str] | None = None) -> Namespace:
        """Read the configuration: defaults, then YAML files in their order, then flags.

        Each choice is a `Choice`, the variants a dict of them, `trainer` a `Choice` of Lightning's; plain options are
        as their dataclass has them. With `resume`, settings come from the folder's config.yaml.

        Raises:
            BadInput: naming the flag.
            SystemExit: after `--help` and `--print_config`.
        """
        self._parsed = None
        self.extend_options({})
        put_working_directory_first()  # jsonargparse imports functions
        layers, bare = read(sys.argv[1:] if argv is None else argv)
        if "help" in bare:
            sys.stdout.write(self._help(layers, bare["help"]))
            raise SystemExit(0)
        settings = self._merge(layers)
        with as_written(settings):
            saved = self._config(self._of_run) if self._of_run else None
            config = self._config(settings)
            self._check(config)
            if saved is not None:
                self._check_same(saved, config, settings)
            elif config.resume and all(self.on_resume(flag).change != "fixed" for flag in self._given):
                none = "there is no config.yaml in it, and no setting for a new run"
                raise BadInput("out", config.out, f"the folder of a run to go on with; {none}")
        if "print_config" in bare:
            sys.stdout.write(self.dump(config))
            raise SystemExit(0)
        self._parsed = config
        return config

    def is_given(self, option: str) -> bool:
        """Return whether the user, or the run that goes on, has set an option or a part of it: else we did."""
        return any(flag == option or flag.startswith(f"{option}.") for flag in (*self._given, *self._of_run))

    def refuse_others(self, option: str, why: str) -> None:
        """Raise BadInput for what the user set beside an option that does not act with it, and say why."""
        acting = {x.name for x in fields(self.options.target) if x.metadata.get("acts_with") == option}
        self._refuse(self._given.keys() - acting - {option}, why)

    def refuse_idle(self, why: str) -> None:
        """Raise BadInput for what the user set that does nothing in this script, and say why."""
        self._refuse(self.idle, why)

    def _refuse(self, flags: Collection[str], why: str) -> None:
        for flag, setting in self._given.items():
            if flag in flags:
                raise BadInput(flag, setting.value, f"not allowed, as {why}")

    def _merge(self, layers: Sequence[Layer]) -> Layer:
        """Merge the settings of the run that goes on, or else the defaults, then recipes, files and flags."""
        layers = [*layers[:-1], self._expand_mappings(layers[-1])]
        self._given = {flag: setting for settings in layers for flag, setting in settings.items()}
        self._of_run = {}
        with as_written(self._given):
            options = {**self.options.defaults, **self._values(self._given)}  # checked together once merged
        path = Path(options["out"] or "") / "config.yaml"
        if options["resume"] and options["out"] and path.exists():
            self._of_run = start = self._read_saved(path)
        else:
            experiment = self._default_options()
            options |= experiment
            start = {**self._defaults, **{option: FlagValue(value) for option, value in experiment.items()}}
        recipes = [
            {flag: setting for flag, setting in settings.items() if flag not in self._of_run}
            for settings in self._recipes_of(options)
        ]
        return merge([start, *recipes, *layers], self._is_same_class)

    def _default_options(self) -> dict[str, Any]:
        """Return the plain options that new runs have with what the user set."""
        return {
            option: value
            for option, value, unless, choices in self._experiments
            if self._given.keys().isdisjoint({option, *unless}) and self._are_chosen(choices)
        }

    def _are_chosen(self, choices: Mapping[str, str]) -> bool:
        flags = self._given
        return all(key in flags and self.classes[key].is_same(flags[key].value, x, {}) for key, x in choices.items())

    def _recipes_of(self, options: Mapping[str, Any]) -> list[Layer]:
        """Return what the values of options set, of plain ones and of those of choices, such as `data.task`."""
        values = {flag: setting.value for flag, setting in {**self._of_run, **self._given}.items()} | {**options}
        return [
            recipe(flags, f"--{option} {'N' if value is ... else value}")
            for option, recipes in self._recipes
            if (chosen := values.get(option)) is not None and chosen is not False
            for value, flags in recipes(values).items()
            if value in (..., chosen) or (isinstance(chosen, list) and value in chosen)
        ]

    def flag_of(self, argument: str) -> str | None:
        """Find the flag of an argument that an object refused: the argument, or the only flag that ends with it.

        An option of an `unchosen` class is below its key. None: no flag or several are called so.
        """
        if self._parsed is None or not argument or self.is_flag(argument):
            return argument
        endings = [flag for flag, _ in flat(self.as_dict(self._parsed)) if flag.endswith(f".{argument}")]
        for flag in (f"{owner}.{argument}" for owner in ONLY_ONE):
            if flag in endings:
                return flag
        if len(endings) == 1:
            return endings[0]
        unchosen = [key for key, target in self.unchosen.items() if argument in options_of(target).hints]
        return f"{unchosen[0]}.{argument}" if unchosen and not endings else None

    def is_flag(self, name: str) -> bool:
        """Return whether the command line has this flag, or flags that begin like it."""
        first = name.partition(".")[0]
        return first in {*self.entries, *self.options.hints} or first in self._with(self.groups).hints

    def _classes_at(self, flag: str) -> Classes | None:
        """Return what a flag chooses from, if it chooses."""
        key = flag.rpartition(".")[0]
        return self.classes.get(key if key in self.entries and self.entries[key].named else flag)

    def _expand_mappings(self, settings: Layer) -> Layer:
        """Replace a choice that a flag has as a mapping by the flags for which it stands."""
        inside, others = dict[str, FlagValue](), dict[str, FlagValue]()
        for flag, setting in settings.items():
            value = read_value(setting.value, flag) if self._classes_at(flag) else None
            if isinstance(value, dict):
                inside |= layer(value, setting.source, flag)
            else:
                others[flag] = setting
        return inside | others

    def _is_same_class(self, flag: str, name: Any, old: Any, options: Layer) -> bool:
        classes = self._classes_at(flag)
        values = {option: setting.value for option, setting in options.items()}
        return name == old if classes is None else classes.is_same(name, old, values)

    def _leave_out(self, key: str, settings: dict[str, FlagValue], instead: str) -> None:
        """Drop the settings of a choice in whose place others are named; BadInput if the user set one."""
        for flag in [flag for flag in settings if f"{flag}.".startswith(f"{key}.")]:
            setting = settings.pop(flag)
            is_default = setting is self._defaults.get(flag) or setting.source.startswith("--")  # or a recipe's
            if setting.value is not None and not is_default:
                raise BadInput(flag, setting.value, f"not allowed with --{instead}, which names the nets")

    def _config(self, settings: Layer) -> Namespace:
        resolver, choices = self._resolve(settings)
        for flag, setting in resolver.settings.items():
            self._check_known(flag, setting.value, resolver)
        resolver.raise_faults()
        for flag, setting in self._given.items():
            if setting == WITHOUT_VALUE:
                raise BadInput(flag, NOTHING, "a value")
        return Namespace(**choices, **vars(self.options.target(**self._values(settings))))

    def _check_known(self, flag: str, value: Any, resolver: Resolver) -> None:
        """Raise BadInput, with near flags, for a flag that is no plain option and below none of the keys."""
        if flag in usage.OF_A_CALL:
            raise BadInput(flag, value, "not allowed in a file")
        if flag in self.options.hints or flag.partition(".")[0] in self.entries:
            return
        group = next((group for group in self.groups if flag in options_of(group.options).hints), None)
        if group is None:
            choices = [key for key in self.entries if key in self.classes or not below(key, resolver.flags)]
            known = [*usage.OF_A_CALL, *choices, *self._with(self.groups).hints, *resolver.flags]
            near_ones = near_flag(flag, known, "--")
            raise BadInput(flag, value, f"a flag of {self.name}{near_ones or '; --help all lists them'}")
        if value is not None:  # as a run of other data has saved it
            raise BadInput(flag, value, f"{group.kind}, not --{group.key} {resolver.settings[group.key].value}")

    def _values(self, settings: Layer) -> dict[str, Any]:
        return {name: self.options.check(name, settings[name].value) for name in self.options.hints if name in settings}

    def _resolve(self, settings: Layer) -> tuple[Resolver, dict[str, Any]]:
        """Do the second pass: choices with their options; flags may still be missing or unknown."""
        resolver, choices = Resolver(settings, self.classes), dict[str, Any]()
        for key, entry in self.entries.items():
            classes = resolver.classes.get(key)
            if classes is not None and entry.fixed is not None:
                resolver.classes[key] = classes = replace(classes, skip=classes.skip.union(entry.fixed(choices)))
            if entry.options is not None:
                if key in settings:
                    expected = f"an option, such as --{key}.{next(iter(entry.options.hints))}"
                    raise BadInput(key, settings[key].value, expected)
                choices[key] = Choice(entry.options.path, resolver.options(entry.options, key, {}))
            elif classes is None:
                if key in settings:
                    raise BadInput(key, settings[key].value, f"a name after it, as --{key}.NAME VALUE")
                choices[key] = {name: setting.value for name, setting in below(key, resolver.settings).items()}
                resolver.flags |= {f"{key}.{name}": (value, "") for name, value in choices[key].items()}
            elif entry.names:
                choices[key] = resolver.named(classes, key, entry.names)
            elif instead := below(entry.replaced_by, resolver.settings):
                self._leave_out(key, resolver.settings, f"{entry.replaced_by}.{next(iter(instead))}")
                choices[key] = None
            else:
                if entry.defaults_from:
                    resolver.copy_options(entry.defaults_from, key)
                choices[key] = resolver.one(classes, key, optional=self._defaults[key].value is None)
        self.extend_options(choices)
        return resolver, choices

    def _check(self, config: Namespace) -> None:
        """Find by trial what types can't tell."""
        for key, entry in self.entries.items():
            chosen = vars(config)[key]
            if entry.options is not None:
                arguments(chosen, key)
            elif entry.names and entry.fixed is None:
                for name, choice in chosen.items():
                    build(choice, f"{key}.{name}")
        for check in self.checks:
            check(config)

    def _read_saved(self, path: Path) -> Layer:
        saved = load(path, "out")
        needed = [key for key in self.entries if not self._is_empty(key)]
        # A run of an older version lacks options that were added; those that are off change nothing.
        off = {name for name, value in self.options.defaults.items() if value is None or value is False}
        needed += [name for name in self.options.hints if self.on_resume(name) is not CALL and name not in off]
        missing = [key for key in needed if key not in saved]
        if missing or not path.read_text("utf-8").endswith("\n"):
            what = f"{missing[0]} is missing" if missing else "its last line is cut off"
            raise BadInput("out", path, f"all settings of the run; {what}")
        # An option of an older version that was off changes nothing; any other is refused as an unknown flag.
        known = {*self.entries, *self._with(self.groups).hints}
        kept = {key: x for key, x in saved.items() if key in known or not (x is None or x is False)}
        earlier = earlier_values(dict(flat(saved, lists=False)))
        settings = layer(kept, str(path)) | layer(earlier)
        return {flag: new for flag, new in settings.items() if new.value or flag not in LEFT}

    def _check_same(self, saved: Namespace, config: Namespace, settings: Layer) -> None:
        """Raise BadInput if a setting differs on which the results of that run depend and by which it can't grow."""
        folder, new = Path(config.out), list[str]()
        for key, names in ((key, entry.names) for key, entry in self.entries.items() if entry.names):
            chosen, used = vars(config)[key], names.used(saved, key)
            new += [f"{key}.{name}" for name in chosen if name not in used]
            for name in {*chosen} - {*vars(saved)[key], *names.used(config, key)}:
                if not settings[f"{key}.{name}"].source.startswith("--"):  # of a recipe
                    expected = f"{name} in --only, too: the run in {folder} is of {', '.join(used)}"
                    raise BadInput(f"{key}.{name}", chosen[name].name, expected)
        before, after = dict(flat(self.as_dict(saved))), dict(flat(self.as_dict(config)))
        check_same(before, after, folder, self.on_resume, new)

    def as_dict(self, config: Namespace) -> dict[str, Any]:
        """Return the configuration as YAML and JSON have it."""
        settings = {}
        for key, entry in self.entries.items():
            value = plain(vars(config)[key])
            if entry.names:  # without a default's name it would come back
                value |= {name: None for name in below(key, self._defaults) if "." not in name and name not in value}
            if value or not self._is_empty(key):
                settings[key] = value["init_args"] if entry.options is not None else value
        names = [name for name in self.options.hints if name in config]  # a saved run's data may be of another kind
        return settings | {name: self.options.plain(name, vars(config)[name]) for name in names}

    def dump(self, config: Namespace, of_run: bool = False) -> str:
        """Write the configuration as YAML for `--config`; `of_run` leaves out options of a single call."""
        settings = self.as_dict(config).items()
        kept = {key: value for key, value in settings if not (of_run and self.on_resume(key) is CALL)}
        return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)

    def _is_empty(self, key: str) -> bool:
        """Return whether settings are written without the key where it has nothing, as by default."""
        return self.on_resume(key) is FREE or (self.entries[key].named and not below(key, self._defaults))

    def _help(self, layers: Sequence[Layer], topics: Sequence[str]) -> str:
        try:
            settings = self._merge(layers)
            resolver = self._resolve(settings)[0]
        except BadInput:
            settings = self._defaults
            resolver = self._resolve(settings)[0]
        values = {**self.options.defaults, **{flag: setting.value for flag, setting in settings.items()}}
        flags = {name: (values[name], as_flags(about, self)) for name, about in self.options.help.items()}
        return usage.text(self, {**flags, **resolver.flags}, topics, layers[-1])
