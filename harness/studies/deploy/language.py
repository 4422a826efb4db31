"""Students of a text as folders that transformers loads, and what each net's folder needs to write texts."""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from apprentice.errors import BadInput
from apprentice.extras import Missing, need
from datamodules import Subwords, Vocabulary
from datamodules.as_tokenizers import as_tokenizer
from harness.runs.files import atomic, write_json, write_text
from harness.runs.launch import is_main_process
from harness.runs.nets import load_net, read_facts
from harness.runs.quiet import notice
from harness.runs.session import Session
from harness.studies.deploy.card import language_card
from lit_modules.nets import HuggingFaceLM
from lit_modules.nets.adapters import adapter_config, adapter_state
from lit_modules.nets.as_transformers import as_transformers, set_tokenizer

FOLDER, ADAPTER, CARD, VOCABULARY = "hf", "adapter", "README.md", "vocabulary.json"


def write_language_models(
    run: Session, teachers: Iterable[str], students: Iterable[str], failed: Mapping[str, str]
) -> None:
    """In the main process of a run of texts, write each net's vocabulary, and `hf/` of the first seed's students.

    A line says which have none, and why; not where transformers is absent from a run of embedded data. `failed` says it
    of those whose loss was not finite.
    """
    vocabulary = getattr(run.data, "vocabulary", None)
    if run.data.task != "tokens" or vocabulary is None or not is_main_process():
        return
    seeds, students = [run.out / f"seed{seed}" for seed in run.config.seeds], list(students)
    for folder in (seed / name for seed in seeds for name in (*teachers, *students)):
        if folder.is_dir():
            write_json(folder / VOCABULARY, vocabulary.plain())
    if not students:
        return
    try:
        need("transformers", "transformers.modeling_utils", "tokenizers")
    except Missing as missing:
        if getattr(run.data, "path", None) is not None:
            notice(f"no {FOLDER}/ of students, for transformers: {missing}")
        return
    template = run.data.conversation_template() if hasattr(run.data, "conversation_template") else None
    tokenizer, without = as_tokenizer(vocabulary, template), list[str]()
    for name, why in failed.items():
        notice(f"no {FOLDER}/ of {name}: {why}")
    for name in (name for name in students if name not in failed):
        if not _write(seeds[0] / name, vocabulary, tokenizer, run.data.end_tokens):
            without.append(name)
    if without:
        notice(f"no {FOLDER}/ of {', '.join(without)}: transformers has no model of this architecture")


def _has_tokens_of(name: str, vocabulary: Vocabulary | Subwords) -> bool:
    """Return whether a vocabulary is that of the model `name`."""
    if not isinstance(vocabulary, Subwords) or vocabulary.name == name:
        return isinstance(vocabulary, Subwords)
    try:
        return vocabulary.same_as(Subwords(name))
    except BadInput:  # it has no tokenizer
        return False


def _write(folder: Path, vocabulary: Vocabulary | Subwords, tokenizer: Any, end_tokens: Sequence[int]) -> bool:
    """Write the model, tokenizer, template, generation config and card of a net's folder into `hf/` in it.

    A response ends at any of `end_tokens`, or if there are none at what model or tokenizer say.
    """
    net = load_net(folder, "out")
    model = as_transformers(net)
    facts = read_facts(folder, "out")
    if model is None or facts is None:
        return False
    name = str(net.name) if isinstance(net, HuggingFaceLM) else None
    set_tokenizer(model, tokenizer, name if name is not None and _has_tokens_of(name, vocabulary) else None)
    if end_tokens:
        model.generation_config.eos_token_id = list(end_tokens)
        if model.generation_config.pad_token_id is None:
            model.generation_config.pad_token_id = end_tokens[0]
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
