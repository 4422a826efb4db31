"""A teacher of texts that runs once: its distribution for each response token in files, for any later run."""

from lit_modules.text.stored_teacher.forms import Form, Stored
from lit_modules.text.stored_teacher.store import TextStore, form_of, read_texts

__all__ = ["Form", "Stored", "TextStore", "form_of", "read_texts"]
