"""Students that embed or rank texts, as folders that sentence-transformers loads."""

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import nn

from apprentice.errors import BadInput
from deploy.card import sentence_card
from deploy.export_folder import CARD, TRANSFORMERS
from harness.runs.files import atomic_folder, write_text
from harness.runs.launch import is_main_process
from harness.runs.nets import load_net, read_facts
from harness.runs.quiet import notice
from harness.runs.session import Session
from lit_modules.nets.embedder import Embedder
from lit_modules.nets.hugging_face_reranker import HuggingFaceReranker
from lit_modules.nets.hugging_face_text import HuggingFaceText


def write_sentence_models(run: Session, names: Collection[str], failed: Mapping[str, str]) -> None:
    """In the main process of a run of rows of texts, write `hf/` into the folders of the first seed's students.

    A line says which have none, and why: another architecture, or, as `failed` says it, a loss that was not finite.
    """
    if run.data.task != "retrieval" or not is_main_process():
        return
    folder = run.out / f"seed{run.config.seeds[0]}"
    for name, why in failed.items():
        notice(f"no {TRANSFORMERS}/ of {name}: {why}")
    others = [name for name in names if name not in failed and not write_sentence_model(folder / name)]
    if others:
        notice(f"no {TRANSFORMERS}/ of {', '.join(others)}: sentence-transformers has no model of this architecture")


def write_sentence_model(folder: Path) -> bool:
    """Write the net of a folder with its tokenizer and card into `hf/` in it; return whether it is of such a kind."""
    held, facts = load_net(folder, "out"), read_facts(folder, "out")
    net = held.net if isinstance(held, Embedder) else held
    if facts is None or not isinstance(net, HuggingFaceText | HuggingFaceReranker):
        return False
    out = folder / TRANSFORMERS
    with atomic_folder(out) as temporary:
        save_net(held, temporary)
        for part in [path for path in temporary.iterdir() if path.is_dir()]:  # of modules, a few lines each
            shutil.copytree(part, out / part.name, dirs_exist_ok=True)
            shutil.rmtree(part)
    write_text(out / CARD.name, sentence_card(folder, facts, sum(p.numel() for p in held.parameters()), net.ranks))
    return True


def save_net(held: nn.Module, folder: Path) -> None:
    """Save a net that reads texts, or one that holds it with a last layer of its own."""
    net = held.net if isinstance(held, Embedder) else held
    last = [*held.head] if isinstance(held, Embedder) else []
    if isinstance(net, HuggingFaceText):
        net.save(folder, *last)
    elif isinstance(net, HuggingFaceReranker) and not last:
        net.save(folder)
    else:
        raise BadInput("net", type(net).__name__, "HuggingFaceText or HuggingFaceReranker")
