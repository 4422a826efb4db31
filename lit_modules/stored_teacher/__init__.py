"""A teacher of texts that runs once: its distribution for each response token in a file, for any later run."""

from lit_modules.stored_teacher.forms import Form, Stored
from lit_modules.stored_teacher.making import form_of, make_cache
from lit_modules.stored_teacher.store import TextStore, read_texts

__all__ = ["Form", "Stored", "TextStore", "form_of", "make_cache", "read_texts"]
