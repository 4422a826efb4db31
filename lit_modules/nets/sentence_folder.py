"""What a folder of sentence-transformers says beside its model: pooling, normalisation, length and prompts.

`modules.json` lists the modules: a transformer in the folder itself or a folder of its own, `Pooling`, `Normalize`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from torch import nn

from apprentice.errors import BadInput

Pool = Literal["mean", "cls", "max", "last"]
MODULES, LIMITS, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
POOLING, NORMALIZE = "1_Pooling", "2_Normalize"
LEGACY: dict[Pool, str] = {
    "cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens", "max": "pooling_mode_max_tokens",
    "last": "pooling_mode_lasttoken",
}  # fmt: skip
NAMES = {"lasttoken": "last"}  # of newer folders, where they are others than ours
QUERY, DOCUMENT = ("query",), ("document", "passage", "corpus")  # names of prompts, the first of them that there is


class SentenceSettings(NamedTuple):
    """How a text becomes an embedding; None where neither a folder nor a user says it."""

    pool: Pool | None = None
    normalize: bool | None = None
    max_length: int | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None
    lower: bool = False

    def replaced_by(self, **options: Any) -> "SentenceSettings":
        """Return these settings with the options that are not None."""
        return self._replace(**{name: value for name, value in options.items() if value is not None})


def read_settings(name: str) -> SentenceSettings:
    """Read what a folder, or a model of the hub, says; nothing of one that is not of sentence-transformers.

    Raises:
        BadInput: it has modules of other kinds, or pools in another way.
    """
    modules = _read(name, MODULES)
    if modules is None:
        return SentenceSettings()
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or modules[0]["path"]:
        expected = "a folder whose modules are Transformer, in itself, Pooling and perhaps Normalize"
        raise BadInput("name", name, f"{expected}; it has {', '.join(kinds)}")
    limits, prompts = _read(name, LIMITS) or {}, (_read(name, PROMPTS) or {}).get("prompts") or {}
    pooling = _read(name, f"{modules[1]['path']}/config.json") or {}
    query, document = (next((prompts[key] for key in keys if key in prompts), None) for keys in (QUERY, DOCUMENT))
    if pooling.get("include_prompt") is False and (query or document):
        raise BadInput("name", name, "a folder whose pooling counts prompts; it leaves them out")
    return SentenceSettings(
        _read_pool(name, pooling), "Normalize" in kinds, limits.get("max_seq_length"), query, document,
        bool(limits.get("do_lower_case")),
    )  # fmt: skip


def _read_pool(name: str, pooling: Mapping[str, Any]) -> Pool:
    modes = pooling.get("pooling_mode") or [key for key in pooling if key.startswith("pooling_mode_") and pooling[key]]
    modes = [modes] if isinstance(modes, str) else list(modes)
    ours = {**{key: pool for pool, key in LEGACY.items()}, **{pool: pool for pool in get_args(Pool)}, **NAMES}
    if len(modes) != 1 or modes[0] not in ours:
        expected = f"pooling by one of {', '.join(get_args(Pool))}; its folder has {', '.join(modes) or 'none'}"
        raise BadInput("name", name, expected)
    pool: Pool = ours[modes[0]]
    return pool


def _read(name: str, file: str) -> Any:
    from transformers.utils import cached_file

    path = cached_file(
        name, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if path is None else json.loads(Path(path).read_text("utf-8"))


def write_settings(folder: Path, settings: SentenceSettings, width: int, last: nn.Linear | None = None) -> None:
    """Write them beside a model of this width and its tokenizer, as all versions of sentence-transformers read them.

    `last` is a layer after all of them.
    """
    modules = [("", "Transformer"), (POOLING, "Pooling")] + [(NORMALIZE, "Normalize")] * bool(settings.normalize)
    pooling = {"word_embedding_dimension": width, **{key: settings.pool == pool for pool, key in LEGACY.items()}}
    prompts = {"query": settings.query_prompt or "", "document": settings.document_prompt or ""}
    files: dict[str, Any] = {
        f"{POOLING}/config.json": pooling,
        LIMITS: {"max_seq_length": settings.max_length, "do_lower_case": settings.lower},
        PROMPTS: {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"},
    }
    if last is not None:
        modules.append((dense := f"{len(modules)}_Dense", "Dense"))
        sizes = {"in_features": last.in_features, "out_features": last.out_features, "bias": last.bias is not None}
        files[f"{dense}/config.json"] = {**sizes, "activation_function": "torch.nn.modules.linear.Identity"}
    files[MODULES] = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    for path, _ in modules:
        (folder / path).mkdir(parents=True, exist_ok=True)
    for file, value in files.items():
        (folder / file).write_text(json.dumps(value, indent=2) + "\n", "utf-8")
    if last is not None:
        from safetensors.torch import save_file

        state = {f"linear.{name}": value.detach().float().cpu() for name, value in last.state_dict().items()}
        save_file(state, folder / dense / "model.safetensors")
