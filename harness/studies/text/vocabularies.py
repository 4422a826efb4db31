"""The vocabulary beside each net of a run of texts, by which it writes, and the template of its chats."""

import json
from collections.abc import Iterable
from pathlib import Path

from apprentice.errors import BadInput
from datamodules.text.chat_templates import Template, template_of
from datamodules.text.vocabulary import Subwords, Vocabulary, vocabulary_of
from harness.runs.files import read_text, write_json
from harness.runs.launch import is_main_process
from harness.runs.nets import read_spec
from harness.runs.records import reading
from harness.runs.session import Session

FILE = "vocabulary.json"
TEMPLATE = "template"  # there where the data are chats: the text of one in Jinja, null for the vocabulary's own


def write_vocabularies(session: Session, names: Iterable[str]) -> None:
    """In the main process of a run of texts, write the data's vocabulary into the folders of nets of these names."""
    vocabulary, template = (getattr(session.data, name, None) for name in ("vocabulary", "chat_template"))
    if session.data.task != "tokens" or vocabulary is None or not is_main_process():
        return
    content = vocabulary.plain() | ({} if template is None else {TEMPLATE: template.plain()})
    names = list(names)
    for folder in (session.out / f"seed{seed}" / name for seed in session.config.seeds for name in names):
        if folder.is_dir():
            write_json(folder / FILE, content)


def read_vocabulary(folder: Path) -> tuple[Vocabulary | Subwords, Template | None]:
    """Read the vocabulary of a net's folder, and the template of its chats, if it has learned some.

    Raises:
        BadInput: the file is absent or damaged, or of another net.
    """
    with reading(folder, "run", f"a net's folder with a readable {FILE}"):
        content = json.loads(read_text(folder / FILE))
        has_chats, text = TEMPLATE in content, content.pop(TEMPLATE, None)
        if not isinstance(text, str | None):
            raise TypeError(TEMPLATE)
        try:
            vocabulary = vocabulary_of(content)
            template = template_of(vocabulary, text, folder / FILE) if has_chats else None
        except BadInput as fault:  # which blames the data
            raise BadInput("run", folder, f"a net whose tokens can be read: {fault}") from None
        if len(vocabulary) != read_spec(folder)["init_args"].get("vocab_size", len(vocabulary)) or not len(vocabulary):
            raise ValueError(f"{len(vocabulary)} tokens are not the net's")
    return vocabulary, template
