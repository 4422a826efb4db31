"""The vocabulary beside each net of a run of texts, by which it writes."""

import json
from collections.abc import Iterable
from pathlib import Path

from datamodules.text.vocabulary import Subwords, Vocabulary, vocabulary_of
from harness.runs.files import read_text, write_json
from harness.runs.launch import is_main_process
from harness.runs.nets import read_spec
from harness.runs.records import reading
from harness.runs.session import Session

FILE = "vocabulary.json"


def write_vocabularies(session: Session, names: Iterable[str]) -> None:
    """In the main process of a run of texts, write the data's vocabulary into the folders of nets of these names."""
    vocabulary = getattr(session.data, "vocabulary", None)
    if session.data.task != "tokens" or vocabulary is None or not is_main_process():
        return
    names = list(names)
    for folder in (session.out / f"seed{seed}" / name for seed in session.config.seeds for name in names):
        if folder.is_dir():
            write_json(folder / FILE, vocabulary.plain())


def read_vocabulary(folder: Path) -> Vocabulary | Subwords:
    """Read the vocabulary of a net's folder; BadInput if its file is damaged, or of another net."""
    with reading(folder, "run", f"a net's folder with a readable {FILE}"):
        vocabulary = vocabulary_of(json.loads(read_text(folder / FILE)))
        if len(vocabulary) != read_spec(folder)["init_args"].get("vocab_size", len(vocabulary)) or not len(vocabulary):
            raise ValueError(f"{len(vocabulary)} tokens are not the net's")
    return vocabulary
