"""Tiny language models of transformers, made here; import in `with_transformers`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORDS = "the quick brown fox jumps over the lazy dog\n"
VOCABULARY = 290
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


SPECIAL = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def save_tokenizer(folder: Path, added: Sequence[str] = (), special: Sequence[str] = SPECIAL) -> Any:
    """Byte-level BPE of a few words, with a chat template; its pad token is its end token, as SmolLM2's.

    `added` are tokens after the others; `special` are the first three, of which the second begins a turn.
    """
    import tokenizers
    import transformers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer, bpe.decoder = tokenizers.pre_tokenizers.ByteLevel(False), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*special],
    )
    bpe.train_from_iterator([WORDS, "the quick lazy fox over user assistant"] * 9, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=special[1], eos_token=special[2], pad_token=special[2]
    )
    tokenizer.add_tokens([transformers.AddedToken(text, special=True) for text in added])
    tokenizer.chat_template = TEMPLATE.replace(SPECIAL[1], special[1]).replace(SPECIAL[2], special[2])
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_llama(folder: Path, **options: Any) -> Any:
    """A Llama of 4 layers with grouped queries, padded to 300 tokens, and its tokenizer."""
    import torch
    import transformers

    save_tokenizer(folder)
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 4, "intermediate_size": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64}
    more = {"tie_word_embeddings": True, "eos_token_id": 2, "pad_token_id": 2, "bos_token_id": 1}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **heads, **more, **options})).eval()
    model.save_pretrained(folder)
    return model
