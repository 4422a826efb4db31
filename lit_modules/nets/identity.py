"""What tells which function a net computes: its classes, options, configurations, weights and buffers.

Outputs that are kept of a teacher are its own if this is the same. Where files lie does not count, nor does the mode
of a net, so a moved folder and a net that has run are known again.
"""

import functools
import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from lit_modules.nets.specs import Recorded

ADAPTER = ".lora_"  # in the names of weights that no file of a model has
# Attributes and options that say where weights come from, or what inputs and logits stand for.
PLACES = frozenset({
    "name", "name_or_path", "tokenizer", "class_names", "expects", "init_args", "training", "_trainer", "_fabric",
})  # fmt: skip
# Of a model of transformers, what says nothing of its function.
UNREAD = frozenset(
    {"name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "id2label", "label2id"}
)
OF_MODULE = frozenset(vars(nn.Module()))


def identify(net: nn.Module) -> str:
    """Hash what decides a net's outputs."""
    return _Descriptions().describe(net)


def hash_weights(net: nn.Module, with_adapters: bool = True) -> str:
    """Hash names, shapes, types and values of a net's parameters and buffers, also of those that no file has."""
    tensors = {**net.state_dict(), **dict(net.named_buffers())}
    digest = hashlib.blake2b(digest_size=16)
    for name, x in sorted(tensors.items()):
        if isinstance(x, Tensor) and (with_adapters or ADAPTER not in name):
            digest.update(repr((name, tuple(x.shape), x.dtype)).encode())
            digest.update(_bytes(x))
    return digest.hexdigest()


def configurations(net: nn.Module) -> dict[str, dict[str, Any]]:
    """Return what the models of transformers in a net are configured with, by their paths, as JSON has it."""
    configs = dict[str, dict[str, Any]]()
    for path, module in net.named_modules():
        to_dict = getattr(getattr(module, "config", None), "to_dict", None)
        if callable(to_dict) and not _inside(path, configs):
            configs[path] = json.loads(json.dumps(_settings(to_dict()), default=str, sort_keys=True))
    return configs


def _inside(path: str, models: Mapping[str, object]) -> bool:
    return any(path.startswith(f"{model}." if model else "") for model in models)


def _settings(value: Any) -> Any:
    if isinstance(value, Mapping):
        names = [name for name in value if name not in UNREAD and not str(name).startswith("_")]
        return {str(name): _settings(value[name]) for name in names}
    return [_settings(entry) for entry in value] if isinstance(value, list | tuple) else value


class Change(NamedTuple):
    """What of a net is not as it was."""

    what: str
    before: object
    now: object

    def __str__(self) -> str:
        return f"{self.what} is {self.now}, and was {self.before}"


@dataclass(frozen=True)
class Origin:
    """What files say of a net: configurations, by the path of the model in it, and a hash of weights, if it has some.

    Of a tokenizer, or of a net that is not loaded, the hash is of what tells it.
    """

    configuration: Mapping[str, Mapping[str, Any]]
    content: str | None = None

    @classmethod
    def of(cls, net: nn.Module, has_weights: bool) -> Self:
        """Describe a net, `has_weights` if it begins with trained ones; adapters are always new."""
        return cls(configurations(net), hash_weights(net, with_adapters=False) if has_weights else None)

    def change(self, now: "Origin") -> Change | None:
        """Return what differs; not settings that one configuration lacks: other versions of a package have more."""
        for path, settings in self.configuration.items():
            for name, value in settings.items():
                other = now.configuration.get(path, {}).get(name, value)
                if other != value:
                    return Change(name, value, other)
        is_other = None not in (self.content, now.content) and self.content != now.content
        return Change("the hash of its content", self.content, now.content) if is_other else None


class _Descriptions:
    """Hashes of values, by what they hold: equal ones have the same, whether or not they are one object."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[object, str]] = {}  # by `id` the object and its hash

    def describe(self, value: Any) -> str:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype):
            return repr(value)
        if inspect.isclass(value) or inspect.isroutine(value):
            return _name(value)
        if id(value) not in self.known:
            self.known[id(value)] = value, "around it"  # of what refers to an object that it is in
            self.known[id(value)] = value, _hash(repr(self._parts(value)).encode())
        return self.known[id(value)][1]

    def _parts(self, value: Any) -> list[Any]:
        if isinstance(value, nn.Module):
            return self._parts_of_net(value)
        if isinstance(value, Tensor):
            return [tuple(value.shape), str(value.dtype), _hash(_bytes(value))]
        if isinstance(value, np.ndarray):
            return [value.shape, value.dtype.str, _hash(value.tobytes())]
        if isinstance(value, Mapping):
            return [(str(name), self.describe(x)) for name, x in value.items() if name not in PLACES]
        if isinstance(value, functools.partial):
            value = value.func, value.args, value.keywords
        elif not isinstance(value, list | tuple | set | frozenset):
            value = type(value), getattr(value, "__dict__", None)
        parts = map(self.describe, value)
        return sorted(parts) if isinstance(value, set | frozenset) else [*parts]

    def _parts_of_net(self, net: nn.Module) -> list[Any]:
        """Return weights and, of each module, its class and what it computes with beside these."""
        configured, parts = configurations(net), [hash_weights(net)]
        modules = dict(net.named_modules())
        self.known |= {id(module): (module, path) for path, module in modules.items()}
        for path, module in modules.items():
            of_model = path in configured or _inside(path, configured)
            options = repr(configured.get(path)) if of_model else self.describe(_options(module))
            parts.append(f"{path} {_name(type(module))} {options}")
        return parts


def _options(module: nn.Module) -> list[Mapping[str, Any]]:
    """Return the arguments of a module's constructor, if it records them, and its attributes."""
    arguments = module.rebuild_arguments(module.init_args) if isinstance(module, Recorded) else {}
    return [arguments, {name: value for name, value in vars(module).items() if name not in OF_MODULE}]


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"


def _bytes(x: Tensor) -> Any:
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _hash(content: Any) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
