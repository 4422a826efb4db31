"""Students of a text as folders that transformers loads, and what each net's folder needs to write texts."""

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from apprentice.extras import Missing, need
from datamodules.as_tokenizers import as_tokenizer
from harness.runs.files import atomic, write_json, write_text
from harness.runs.launch import is_main_process
from harness.runs.nets import load_net, read_facts
from harness.runs.quiet import notice
from harness.runs.session import Session
from harness.studies.deploy.card import language_card
from lit_modules.nets import HuggingFaceLM
from lit_modules.nets.adapters import adapter_config, adapter_state
from lit_modules.nets.as_transformers import as_transformers

FOLDER, ADAPTER, CARD, VOCABULARY = "hf", "adapter", "README.md", "vocabulary.json"


def write_language_models(run: Session, teachers: Iterable[str], students: Iterable[str]) -> None:
    """In the main process of a run of texts, write each net's vocabulary, and `hf/` of the first seed's students.

    A line says which have none, and why; not where transformers is absent from a run of embedded data.
    """
    vocabulary = getattr(run.data, "vocabulary", None)
    if run.data.task != "tokens" or vocabulary is None or not is_main_process():
        return
    seeds, students = [run.out / f"seed{seed}" for seed in run.config.seeds], list(students)
    for folder in (seed / name for seed in seeds for name in (*teachers, *students)):
        if folder.is_dir():
            write_json(folder / VOCABULARY, vocabulary.plain())
    try:
        need("transformers", "transformers.modeling_utils", "tokenizers")
    except Missing as missing:
        if getattr(run.data, "path", None) is not None:
            notice(f"no {FOLDER}/ of students, for transformers: {missing}")
        return
    template = run.data.conversation_template() if hasattr(run.data, "conversation_template") else None
    tokenizer, without = as_tokenizer(vocabulary, template), list[str]()
    for name in students:
        if not _write(seeds[0] / name, tokenizer):
            without.append(name)
    if without:
        notice(f"no {FOLDER}/ of {', '.join(without)}: transformers has no model of this architecture")


def _write(folder: Path, tokenizer: Any) -> bool:
    """Write the model, tokenizer, template, generation config and card of a net's folder into `hf/` in it."""
    net = load_net(folder, "out")
    model = as_transformers(net)
    facts = read_facts(folder, "out")
    if model is None or facts is None:
        return False
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(model.generation_config, name) is None and (token := getattr(tokenizer, name)) is not None:
            setattr(model.generation_config, name, token)
    out = folder / FOLDER
    with _recorded(out) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    # What the adapters of a changed model belong to, such as those of a pruned one, has no name.
    if isinstance(net, HuggingFaceLM) and (rank := net.init_args["lora_rank"]) and not net.init_args["config"]:
        with _recorded(folder / ADAPTER) as temporary:
            config = adapter_config(rank)
            config.base_model_name_or_path = net.name
            config.save_pretrained(temporary)
            from safetensors.torch import save_file

            save_file(adapter_state(net.model), temporary / "adapter_model.safetensors")
    write_text(out / CARD, language_card(folder, facts, sum(p.numel() for p in net.parameters())))
    return True


@contextmanager
def _recorded(out: Path) -> Iterator[Path]:
    """Yield a temporary folder whose files are moved to `out`, and recorded as the run's."""
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as temporary:
        yield Path(temporary)
        for path in sorted(Path(temporary).iterdir()):
            with atomic(out / path.name) as target:
                shutil.move(path, target)
