"""GGUF files of llama.cpp, converted once into folders that transformers reads like any other."""

import contextlib
import hashlib
import importlib
import io
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from apprentice.errors import BadInput, reason
from apprentice.extras import need

MAGIC = b"GGUF"


def model_folder(name: str, flag: str = "name") -> str:
    """Return the folder of a converted GGUF file, or of a folder that holds one and no `config.json`.

    Any other name is returned as it is. Reading a GGUF file takes transformers seconds even for its configuration
    alone, and the model that it gives refuses `save_pretrained`. So the first use writes the model in float32, its
    tokenizer and its chat template to `apprentice/gguf` in the user's cache folder (`$XDG_CACHE_HOME`, or `~/.cache`),
    under a name made of the file's path, size and time.

    Raises:
        Missing: the package gguf is not installed.
        BadInput: there is no such file, several in the folder, or one that transformers can't read; `flag` named it.
    """
    file = _find_file(name, flag)
    if file is None:
        return name
    status = file.stat()
    digest = hashlib.blake2b(f"{file} {status.st_size} {status.st_mtime_ns}".encode(), digest_size=8).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "apprentice" / "gguf" / f"{file.stem}-{digest}"
    if not folder.exists():
        with file.open("rb") as content:
            if content.read(len(MAGIC)) != MAGIC:
                raise BadInput(flag, name, "a GGUF file; this one does not begin as one")
        need("language", "gguf", "transformers.modeling_utils")
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}")  # another run may convert the same file
        try:
            _convert(file, temporary)
            try:
                temporary.rename(folder)
            except OSError:
                if not folder.exists():  # no other run was first
                    raise
        except Exception as error:  # noqa: BLE001 - whatever a reader makes of a damaged file
            raise BadInput(flag, name, f"a GGUF file of a language model; it says: {reason(error)}") from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return str(folder)


def _find_file(name: str, flag: str) -> Path | None:
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise BadInput(flag, name, "a GGUF file; there is none")
        return path.resolve()
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise BadInput(flag, name, f"one of its GGUF files, such as {files[0]}")
    return files[0].resolve() if files else None


def _convert(file: Path, folder: Path) -> None:
    """Write the model, with weights in float32, and its tokenizer."""
    transformers = importlib.import_module("transformers")
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder.mkdir(parents=True)
    # The progress bar of its reader is written to stderr whatever transformers is told.
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, output_loading_info=True
        )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"it has no {missing[0]}")
    config = model.config
    del config.quantization_config  # with it `save_pretrained` refuses
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
