"""Tiny language models of transformers, made here; import inside of a `Run`, as transformers stays imported."""

import json
from pathlib import Path
from typing import Any

WORDS = "the quick brown fox jumps over the lazy dog\n"
VOCABULARY = 290
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path) -> Any:
    """Byte-level BPE of a few words, with a chat template; its pad token is its end token, as SmolLM2's."""
    import tokenizers
    import transformers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer, bpe.decoder = tokenizers.pre_tokenizers.ByteLevel(False), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    bpe.train_from_iterator([WORDS, "the quick lazy fox over user assistant"] * 9, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = TEMPLATE
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


def save_gguf(model: Any, tokenizer: Any, file: Path) -> None:
    """Write a Llama as llama.cpp has it: keys and queries of a head permuted, in float32."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    names = {number: token for token, number in tokenizer.get_vocab().items()}
    tokens = [names.get(number, f"<unused{number}>") for number in range(len(names))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if number < 3 else 1 for number in range(len(tokens))])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
    places = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in model.state_dict().items():
        x, part = value.float(), name.split(".")[-2]
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if part in heads:
            x = x.view(heads[part], 2, x.shape[0] // heads[part] // 2, -1).transpose(1, 2).reshape(x.shape)
        writer.add_tensor(places.get_name(name, (".weight",)), x.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
