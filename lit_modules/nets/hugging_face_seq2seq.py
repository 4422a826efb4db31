"""Encoder-decoders of transformers, as T5, as language models of prompts and responses."""

from typing import Any, Literal

from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.nets.encoded_prompts import EncoderDecoderNet
from lit_modules.nets.hugging_face_text import set_dropout
from lit_modules.nets.own_tokens import OwnTokens, check_model, read_dtype
from lit_modules.nets.transformers_models import SAFE, change_config, import_transformers, load_model


class HuggingFaceSeq2Seq(OwnTokens, EncoderDecoderNet):
    """An encoder-decoder of transformers (T5, BART), for the tokens of its own tokenizer: `data.tokenizer NAME`.

    Its encoder reads a prompt up to the model's end token, its decoder what follows, after the model's own start token.
    Logits beyond the data's vocabulary are cut off. It has no dropout.

    Args:
        name: a model of the hub, or a folder that `save_pretrained` wrote; its configuration is read again to rebuild
            the net.
        vocab_size: number of tokens, V.
        block_size: tokens of a text at most, T.
        pretrained: start with its weights, not with new ones.
        config: changes to its configuration, as {"num_layers": 1, "num_decoder_layers": 1}: a smaller model of the same
            family, with new weights.
        dtype: of its weights; those that are trained are float32.

    Raises:
        Missing: transformers is not installed.
        BadInput: no such model, or one for fewer tokens or shorter texts, without an end or start token, or a
            configuration that it can't have.
    """

    def __init__(
        self, name: str, vocab_size: int, block_size: int, pretrained: bool = False,
        config: dict[str, Any] | None = None, dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:  # fmt: skip
        super().__init__()
        of_weights = read_dtype(dtype, config, pretrained)
        self.name, self.vocab_size, self.block_size = name, vocab_size, block_size
        with import_transformers(name, "an encoder-decoder") as transformers:
            settings = transformers.AutoConfig.from_pretrained(name, **SAFE)
            change_config(settings, config or {})
            rates, kind = set_dropout(settings, 0.0), transformers.AutoModelForSeq2SeqLM
            self.model: Any
            if pretrained:
                self.model, missing = load_model(kind, name, of_weights, config=settings)
                self.tokenizer = name
            else:
                self.model, missing = kind.from_config(settings, dtype=of_weights), []
            vars(self.model.config).update(rates)  # for those who train it elsewhere
        self.model.train()
        check_model(name, settings, missing, vocab_size, block_size)
        end, start = self.model.config.eos_token_id, self.model.config.decoder_start_token_id
        if not isinstance(end, int) or not isinstance(start, int):
            raise BadInput("name", name, "a model with one end token and a decoder's start token")
        self.prompt_end, self.start = end, start

    def encode(self, prompts: Tensor, present: Tensor) -> tuple[Any, Tensor]:
        mask = present.long()
        return self.model.get_encoder()(input_ids=prompts, attention_mask=mask, return_dict=True), mask

    def begin(self, memory: Any, capacity: int) -> Any:
        from transformers import DynamicCache, EncoderDecoderCache

        return EncoderDecoderCache(DynamicCache(), DynamicCache())  # which grow by the decoder's layers

    def decode(self, tokens: Tensor, memory: Any, past: Any = None) -> tuple[Tensor, Any]:
        states, mask = memory
        options = {} if past is None else {"past_key_values": past}
        output = self.model(
            encoder_outputs=states, attention_mask=mask, decoder_input_ids=tokens, use_cache=past is not None, **options
        )
        logits: Tensor = output.logits[..., : self.vocab_size]
        return logits, past

    def end(self, x: Tensor) -> Tensor:
        return x
