"""Trained nets as files: `weights.pt`, a bare state dict, and `net.yaml`: class, arguments, what users need to know."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
import yaml
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from apprentice.errors import BadInput, reason
from apprentice.weights import check_weights
from harness.cli.classes import import_class
from harness.runs.facts import KEYS, NetFacts, Spec
from harness.runs.files import atomic, read_text, write_text
from harness.runs.records import check_format, reading
from lit_modules.nets.base import unwrap_logits
from lit_modules.nets.identity import Origin
from lit_modules.nets.specs import rebuild
from lit_modules.nets.stored import TeacherWithoutWeights
from lit_modules.nets.weights import full_names, load_checked, plain_state, read_weights

MOST_FOLDERS = 5  # folders of nets in a message
NET_FILES = ("weights.pt", "net.yaml")
AVERAGE = "ema"  # the folder of a moving average, in that of its net
SPEC = ("class_path", "init_args")  # in net.yaml, beside the facts


def save_net(net: nn.Module, net_spec: Spec, folder: Path, facts: NetFacts | None = None) -> None:
    """Write `weights.pt`, on the CPU and under the plain net's names, and `net.yaml`, with what users need to know."""
    folder.mkdir(parents=True, exist_ok=True)
    write_spec(net_spec, folder, facts)
    weights = {key: value.detach().cpu().contiguous() for key, value in plain_state(net).items()}
    with atomic(folder / "weights.pt") as temporary:
        torch.save(weights, temporary)


def save_checkpoint(module: LightningModule, path: Path) -> None:
    """Write a module with its hyperparameters, for `load_from_checkpoint`, as Lightning does for weights alone.

    Lightning needs a Trainer for it, and that may ask a launcher for ranks.
    """
    content = {
        "epoch": 0, "global_step": 0, "pytorch-lightning_version": lightning.__version__,
        "state_dict": module.state_dict(), module.CHECKPOINT_HYPER_PARAMS_KEY: dict(module.hparams),
    }  # fmt: skip
    module.on_save_checkpoint(content)
    with atomic(path) as temporary:
        torch.save(content, temporary)


def write_spec(net_spec: Spec, folder: Path, facts: NetFacts | None = None) -> None:
    """Write `net.yaml` into the folder."""
    content = {**net_spec, **(facts.to_plain() if facts else {})}
    write_text(folder / "net.yaml", yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def _read_yaml(folder: str | Path, flag: str) -> dict[str, Any]:
    """Read all of a folder's `net.yaml`; BadInput if there is no such file, or it holds something else."""
    path = Path(folder) / "net.yaml"
    try:
        content = yaml.safe_load(read_text(path))
        if {*SPEC} <= {*content} <= {*SPEC, *KEYS} and isinstance(content["init_args"], dict):
            return content
        why = f"it does not say {' and '.join(SPEC)}, and nothing but {', '.join(KEYS)} beside these"
    except (FileNotFoundError, NotADirectoryError):
        expected = f"a net's folder, as RUN/seed0/kd, with weights.pt and net.yaml{nets_in(folder)}"
        raise BadInput(flag, folder, expected) from None
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        why = f"{type(error).__name__}: {reason(error)}"
    raise BadInput(flag, folder, f"a net's folder, whose net.yaml can be read; {path}: {why}")


def read_spec(folder: str | Path, flag: str = "run") -> Spec:
    """Read how to rebuild a folder's net; BadInput if there is no `net.yaml`, or it holds something else."""
    content = _read_yaml(folder, flag)
    return {name: content[name] for name in SPEC}


def read_facts(folder: str | Path, flag: str = "run") -> NetFacts | None:
    """Read what users of a folder's net need to know; None of a net that an older version saved.

    Raises:
        BadInput: there is no `net.yaml`, or it holds something else.
    """
    content = _read_yaml(folder, flag)
    if "inputs" not in content:
        return None
    with reading(Path(folder) / "net.yaml", flag, "the facts of a net, as it was saved"):
        return NetFacts.read(content)


def nets_in(folder: str | Path) -> str:
    """Return the folders of nets in a run's folder or one of its seeds', as the end of a message."""
    nets = [str(path.parent) for pattern in ("*", "*/*") for path in Path(folder).glob(f"{pattern}/net.yaml")]
    return f"; there: {', '.join(sorted(nets)[:MOST_FOLDERS])}" if nets else ""


def check_options(weights: str | Path, net_spec: Spec, flag: str) -> None:
    """Raise BadInput if a run's `weights.pt` is of a net with other options, such as ViT's heads, than this spec's.

    Those that shapes tell, names of files, the dropout and the backend may differ.
    """
    folder = Path(weights).parent
    if Path(weights).name != "weights.pt" or not (folder / "net.yaml").exists():
        return
    trained = read_spec(folder, flag)
    trained = trained["init_args"].get("net", trained)  # of a net that embeds, the one whose classifier is left out
    if trained["class_path"] == net_spec["class_path"]:
        for option, value in net_spec["init_args"].items():
            expected = trained["init_args"].get(option, value)
            if option not in {"backend", "dropout", "input_shape", "name", "num_classes"} and value != expected:
                raise BadInput(f"{flag}.{option}", value, f"{expected}, as {folder / 'net.yaml'} has it")


def read_classes(folder: str | Path) -> tuple[str, ...]:
    """Read the names of the classes in a folder's `net.yaml`; none if there is no such file, or it has none."""
    try:
        names = _read_yaml(folder, "run").get("classes")
        return tuple(map(str, names)) if isinstance(names, list) else ()
    except BadInput:
        return ()


def read_expects(folder: str | Path) -> dict[str, tuple[float, ...]]:
    """Read `mean` and `std` of the images that a folder's net has learnt from; none if its `net.yaml` says nothing."""
    try:
        facts = read_facts(folder)
    except BadInput:
        return {}
    return {"mean": facts.inputs.mean, "std": facts.inputs.std} if facts and facts.inputs.mean else {}


def check_finished(out: Path) -> None:
    """Raise BadInput if a run's folder lacks a net of a finished fit, or has a record of another format."""
    for record in sorted([*out.glob("seed[0-9]*/*.json"), *out.glob("tuning/seed[0-9]*/teacher.json")]):
        for name in _names_in(record):
            for path in (record.parent / name / file for file in NET_FILES):
                if not path.exists():
                    expected = f"the nets of finished fits; without it, delete {record}, and they are trained again"
                    raise BadInput("out", path, expected)


def _names_in(record: Path) -> list[str]:
    """List the nets of a fit's record; BadInput for another format, none if it is damaged, as its reader will say."""
    try:
        facts = json.loads(read_text(record))
        if isinstance(facts, dict):
            check_format(facts, record)
        return list(facts["nets"])
    except BadInput:
        raise
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _rebuild(value: Any, flag: str) -> Any:
    """Build a net, without its weights, from its spec and the specs inside; return any other value as it is."""
    if isinstance(value, list):
        return [_rebuild(entry, flag) for entry in value]
    if isinstance(value, dict) and value.get("waits"):  # a class that an argument names
        return rebuild(value, flag)
    if not (isinstance(value, dict) and set(value) == {"class_path", "init_args"}):
        return value
    arguments = {name: _rebuild(argument, flag) for name, argument in value["init_args"].items()}
    return unwrap_logits(import_class(value["class_path"], flag, (nn.Module,))(**arguments))


def load_net(folder: str | Path, flag: str = "run", weights: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Rebuild a folder's net, in the weights' type and in eval mode, on the CPU; `flag` named the folder.

    Raises:
        BadInput: a file is missing or damaged, or the weights don't fit the net; the message names all that differ.
    """
    net_spec, path = read_spec(folder, flag), str(Path(folder) / "weights.pt")
    try:
        net: nn.Module = _rebuild(net_spec, flag)
    except Exception as error:  # whatever the class makes of the arguments
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadInput(flag, folder, f"a net's folder, whose net.yaml its class takes; it says: {cause}") from error
    if isinstance(net, TeacherWithoutWeights):
        raise BadInput(flag, folder, "a net with weights; the run read this teacher's outputs, and did not load it")
    begun = Origin(_read_yaml(folder, flag).get("configuration", {}))
    if change := begun.change(Origin.of(net, has_weights=False)):
        expected = f"a net's folder, whose configuration is as it was trained; {change}"
        raise BadInput(flag, folder, expected)
    weights = full_names(net, read_weights(path, flag) if weights is None else weights)
    kinds = {value.dtype for value in weights.values()} & {torch.float64, torch.bfloat16}
    if kinds - {p.dtype for p in net.parameters()}:  # models of transformers keep some buffers in float32
        net.to(kinds.pop())
    check_weights(net.state_dict(), weights, path, flag)
    load_checked(net, weights)
    read_facts_of_weights(net, folder, getattr(net, "class_names", None))  # a user's net may have its own
    return net.eval()


def read_facts_of_weights(net: Any, folder: str | Path, class_names: tuple[str, ...] | None = None) -> None:
    """Let a net have the names of the classes that its folder's weights know, unless given, and what they expect."""
    net.class_names = read_classes(folder) if class_names is None else class_names
    if expects := read_expects(folder):
        net.expects = expects
