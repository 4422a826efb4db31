"""Vocabularies as tokenizers of transformers, with the same numbers of tokens and the chat template of `Chat`."""

import importlib
from typing import Any

from datamodules.text.chat_templates import Template
from datamodules.text.conversations import ASSISTANT
from datamodules.text.marked_turns import END, MARKS, MarkedTurns
from datamodules.text.vocabulary import Subwords, Vocabulary

UNKNOWN = "unknown character"  # which is no token, so that tokenizers refuses a text that needs it
ROLES = "{%- set marks = {" + ", ".join(f"'{role}': '{mark}'" for role, mark in MARKS.items()) + "} -%}"
TURNS = "{%- for message in messages -%}{{ marks[message['role']] + message['content'] + '" + END + "' }}{%- endfor -%}"
PROMPT = "{%- if add_generation_prompt -%}{{ '" + MARKS[ASSISTANT] + "' }}{%- endif -%}"


def as_tokenizer(vocabulary: Vocabulary | Subwords, template: Template | None = None) -> Any:
    """Return a tokenizer of transformers, which has to be installed; `template` is that of conversations, if any.

    That of bytes has no special tokens: transformers finds these by how they are written, and would take the letter
    which stands for a byte, as "ă" for U+0003, for one where a text has it. Of characters, one that is unknown raises.
    """
    if isinstance(vocabulary, Subwords):
        tokenizer = vocabulary.tokenizer
        text = getattr(template, "template", None)
        if text is not None:
            tokenizer.chat_template = text
        return tokenizer
    tokenizers = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")
    if vocabulary.characters is None:
        letters = _letters_of_bytes()
        made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = tokenizers.decoders.ByteLevel()
    else:
        places = {letter: i for i, letter in enumerate(vocabulary.characters)}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(places, unk_token=UNKNOWN))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        made.decoder = tokenizers.decoders.Fuse()
    options: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    if isinstance(template, MarkedTurns) and vocabulary.characters is not None:
        options |= {"eos_token": END, "pad_token": END}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **options)
    if isinstance(template, MarkedTurns):
        tokenizer.chat_template = ROLES + TURNS + PROMPT
    return tokenizer


def _letters_of_bytes() -> list[str]:
    """Return the characters by which byte-level tokenizers write the bytes 0 to 255 (GPT-2's `bytes_to_unicode`)."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
