"""Settings as flags, and which of them no result depends on."""

from collections.abc import Iterator
from typing import Any

# What belongs to one invocation, not to the experiment.
INVOCATION = frozenset({"out", "resume", "overwrite"})
FREE = INVOCATION | {
    "checkpoint_every",
    "trainer.devices", "trainer.strategy", "trainer.accelerator", "trainer.num_nodes", "trainer.logger",
    "trainer.log_every_n_steps", "trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.profiler",
}  # fmt: skip


def free(flag: str) -> bool:
    """Whether it may differ when a run goes on, because no result depends on it."""
    return flag in FREE or flag.startswith("trainer.strategy.")


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Plain settings as flags and their values."""
    if isinstance(value, dict):
        for name, inner in value.items():
            below = key if name in {"class_path", "init_args"} else f"{key}.{name}".lstrip(".")
            yield from flat(inner, below)
    elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        for i, entry in enumerate(value):
            yield from flat(entry, f"{key}.{i}")
    else:
        yield key, value
