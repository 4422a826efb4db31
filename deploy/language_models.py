"""Language models that a run has trained, as folders that transformers and peft load."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from apprentice.errors import BadInput
from apprentice.extras import Missing, need
from datamodules.text.base import TextData
from datamodules.text.vocabulary import Subwords, Vocabulary
from deploy.as_tokenizers import as_tokenizer
from deploy.as_transformers import as_transformers, set_tokenizer
from deploy.card import language_card
from deploy.export_folder import ADAPTER, CARD, TRANSFORMERS
from harness.runs.files import atomic_folder, write_text
from harness.runs.launch import is_main_process
from harness.runs.nets import load_net, read_facts
from harness.runs.quiet import notice
from harness.runs.session import Session
from lit_modules.nets.adapters import adapter_config, adapter_state
from lit_modules.nets.hugging_face import HuggingFaceLM
from lit_modules.nets.hugging_face_seq2seq import HuggingFaceSeq2Seq


def write_language_models(run: Session, names: Collection[str], failed: Mapping[str, str]) -> None:
    """In the main process of a run of texts, write `hf/` into the folders of the first seed's students.

    A line says which have none, and why; not where transformers is absent from a run of embedded data. `failed` says it
    of those whose loss was not finite.
    """
    data: Any = run.data
    vocabulary = getattr(data, "vocabulary", None)
    if data.task != "tokens" or vocabulary is None or not is_main_process():
        return
    try:
        need("transformers", "transformers.modeling_utils", "tokenizers")
    except Missing as missing:
        if getattr(data, "path", None) is not None:
            notice(f"no {TRANSFORMERS}/ of students, for transformers: {missing}")
        return
    tokenizer, without = as_tokenizer(vocabulary, data.chat_template), list[str]()
    for name, why in failed.items():
        notice(f"no {TRANSFORMERS}/ of {name}: {why}")
    for name in (name for name in names if name not in failed):
        folder = run.out / f"seed{run.config.seeds[0]}" / name
        if not _write(folder, data, tokenizer):
            without.append(name)
    if without:
        notice(f"no {TRANSFORMERS}/ of {', '.join(without)}: transformers has no model of this architecture")


def _has_tokens_of(name: str, vocabulary: Vocabulary | Subwords) -> bool:
    """Return whether a vocabulary is that of the model `name`."""
    if not isinstance(vocabulary, Subwords) or vocabulary.name == name:
        return isinstance(vocabulary, Subwords)
    try:
        return vocabulary.same_as(Subwords(name))
    except BadInput:  # it has no tokenizer
        return False


def _write(folder: Path, data: TextData, tokenizer: Any) -> bool:
    """Write the model, tokenizer, template, generation config and card of a net's folder into `hf/` in it.

    A response ends at any of the data's `end_tokens`, or if there are none at what model or tokenizer say.
    """
    vocabulary, end_tokens = data.vocabulary, data.end_tokens
    net = load_net(folder, "out")
    model = as_transformers(net)
    facts = read_facts(folder, "out")
    if model is None or facts is None:
        return False
    name = str(net.name) if isinstance(net, HuggingFaceLM | HuggingFaceSeq2Seq) else None
    set_tokenizer(model, tokenizer, name if name is not None and _has_tokens_of(name, vocabulary) else None)
    if end_tokens:
        model.generation_config.eos_token_id = list(end_tokens)
        if model.generation_config.pad_token_id is None:
            model.generation_config.pad_token_id = end_tokens[0]
    out = folder / TRANSFORMERS
    with atomic_folder(out) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    # What the adapters of a changed model belong to, such as those of a pruned one, has no name.
    if isinstance(net, HuggingFaceLM) and (rank := net.init_args["lora_rank"]) and not net.init_args["config"]:
        with atomic_folder(folder / ADAPTER) as temporary:
            config = adapter_config(rank)
            config.base_model_name_or_path = net.name
            config.save_pretrained(temporary)
            from safetensors.torch import save_file

            save_file(adapter_state(net.model), temporary / "adapter_model.safetensors")
    kinds = {
        "has_encoder": isinstance(net, HuggingFaceSeq2Seq),
        "has_known_tokens": isinstance(vocabulary, Subwords),
        "answers": data.chat_template is not None,
    }
    write_text(out / CARD.name, language_card(folder, facts, sum(p.numel() for p in net.parameters()), **kinds))
    return True
