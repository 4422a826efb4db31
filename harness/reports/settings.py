"""The settings of a run as people read them: a class with its options, such as `Adam(lr=0.001)`."""

from collections.abc import Collection, Mapping
from typing import Any

# These come first; the others follow in the order of the configuration.
FIRST = (
    *("data", "teacher", "teacher_ckpt", "student", "optimizer", "scheduler", "net", "model"),
    *("trainer.max_epochs", "trainer.max_steps", "trainer.precision", "trainer.strategy", "trainer.devices", "exact"),
)
# These choose rows, their order and what they are judged by, or set other settings: they change no net.
OF_TABLE = frozenset({"only", "zoo", "recipe", "metric"})
ELSEWHERE = {"seeds", "variants", "trainer", "teacher_cache_mb", *OF_TABLE}  # on lines of their own, or of no effect
NEUTRAL = {
    "trainer.max_epochs": -1, "trainer.max_steps": -1, "trainer.accumulate_grad_batches": 1,
    "trainer.check_val_every_n_epoch": 1,
}  # fmt: skip


def settings(config: Mapping[str, Any], free: Collection[str]) -> list[str]:
    """Return all settings but the `free` ones, and the devices, as `name value`; what is null or false is left out."""
    flags = {**config, **{f"trainer.{name}": value for name, value in (config.get("trainer") or {}).items()}}
    names = [*(name for name in FIRST if name in flags), *(name for name in flags if name not in FIRST)]
    written = [name for name in names if name in FIRST or name not in {*free, *ELSEWHERE}]
    acting = {name: flags[name] for name in written if flags[name] != NEUTRAL.get(name)}
    return [_line(name, value) for name, value in acting.items() if not is_off(value)]


def _line(name: str, value: Any) -> str:
    plain = isinstance(value, dict) and "class_path" not in value  # options of a class that can't be chosen
    return f"{name}{write_value(value)}" if plain else f"{name} {write_value(value)}"


def is_off(value: Any) -> bool:
    """Return whether a setting is null or false; 0 is neither."""
    return value is None or value is False


def write_value(value: Any) -> str:
    """Return a value as text; a class has its options, but for those that are null or false."""
    if isinstance(value, list):
        return f"[{', '.join(map(write_value, value))}]"
    if not isinstance(value, dict):
        return str(value)
    options = value.get("init_args") or {} if "class_path" in value else value
    arguments = ", ".join(f"{name}={write_value(option)}" for name, option in options.items() if not is_off(option))
    return str(value.get("class_path", "")).rpartition(".")[2] + (f"({arguments})" if arguments else "")
