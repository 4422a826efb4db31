"""Language models and vocabularies as those of transformers: the same logits, the same numbers of tokens."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from apprentice.keyed import with_seed
from datamodules import Vocabulary
from datamodules.text.conversations import Conversation
from datamodules.text.marked_turns import MarkedTurns
from deploy.as_tokenizers import as_tokenizer
from deploy.as_transformers import as_transformers, set_tokenizer
from lit_modules.nets import GPT, HuggingFaceLM, LightNN, pipeline_stages
from lit_modules.text.stored_teacher import Form, Stored, TextStore
from tests import with_transformers
from tests.commands import bad_input
from tests.language_parts import save_llama

pytestmark = pytest.mark.extras("transformers")
TEXT = "ă the quick\tbrown  fox\n\njumps! Über\x00 ñ 'don't' <|x|>\n"


@with_transformers.in_fork
def test_logits_of_a_gpt(folder: Path) -> None:
    import transformers

    warnings.simplefilter("ignore")
    tokens = torch.arange(32).view(2, 16) * 7 % 60
    cases: list[dict[str, Any]] = [{}, {"bias": False}, {"tie_weights": False, "dropout": 0.1}]
    for number, options in enumerate(cases):
        net = with_seed(0, lambda options=options: GPT(60, 16, 3, 2, 8, **options)).double().eval()
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        as_transformers(net).save_pretrained(folder / str(number))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / str(number), dtype=torch.float64).eval()
        torch.testing.assert_close(theirs(tokens).logits, net(tokens), rtol=1e-9, atol=1e-9)
        single = net.float()
        as_transformers(single).save_pretrained(folder / str(number))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / str(number)).eval()
        torch.testing.assert_close(theirs(tokens).logits, single(tokens), rtol=1e-5, atol=1e-5)
    assert as_transformers(LightNN((1, 8, 8))) is None
    config = as_transformers(GPT(60, 16, 1, 2, 8, dropout=0.1, attention_dropout=0.2)).config
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.1, 0.1, 0.2)


@with_transformers.in_fork
def test_tokenizers_and_templates(folder: Path) -> None:
    import transformers

    warnings.simplefilter("ignore")
    turns = [{"role": "user", "content": "Über\n x"}, {"role": "assistant", "content": " y  z"}]
    for name, vocabulary in {
        "bytes": Vocabulary(),
        "characters": Vocabulary(TEXT + "\x01\x02\x03\x04\x05 xyz"),
    }.items():
        marked = MarkedTurns(vocabulary)
        as_tokenizer(vocabulary, marked).save_pretrained(folder / name)
        theirs = transformers.AutoTokenizer.from_pretrained(folder / name)
        assert theirs(TEXT)["input_ids"] == vocabulary.encode(TEXT).tolist()
        assert theirs.decode(vocabulary.encode(TEXT)) == TEXT
        assert len(theirs) == len(vocabulary)
        encoded = marked.encode(Conversation("a", turns, None)).tokens.tolist()
        assert theirs.apply_chat_template(turns)["input_ids"] == encoded
        prompt = theirs.apply_chat_template(turns[:1], add_generation_prompt=True)["input_ids"]
        assert prompt == encoded[: len(prompt)]
        assert encoded[-1] == marked.ends()[0]
        assert theirs.eos_token_id == (None if name == "bytes" else encoded[-1])  # "ă" stands for the byte 3
    with pytest.raises(Exception, match=r"\[UNK\]"):
        theirs("€")


@with_transformers.in_fork
def test_other_tokens(folder: Path) -> None:
    """A model has the tokens of its texts, and settings of generation of its name only if those are its own."""
    import transformers

    warnings.simplefilter("ignore")
    save_llama(folder / "lm")
    (folder / "lm" / "generation_config.json").write_text('{"eos_token_id": [2, 0], "temperature": 0.5}')
    net = HuggingFaceLM(str(folder / "lm"), 20, 8).eval()
    vocabulary, theirs = Vocabulary("abcdefghijklmnopqrst"), transformers.AutoTokenizer.from_pretrained(folder / "lm")
    for tokenizer, name in ((as_tokenizer(vocabulary), None), (theirs, net.name)):
        model = as_transformers(net)
        set_tokenizer(model, tokenizer, name)
        model.save_pretrained(folder / "hf")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
        tokens = torch.arange(8)[None]
        assert torch.equal(model(tokens).logits, net(tokens))
        settings = model.generation_config
        if name is None:
            assert (settings.eos_token_id, model.config.eos_token_id) == (None, None)
            assert settings.temperature != 0.5
        else:
            assert (settings.eos_token_id, model.config.eos_token_id) == ([2, 0], 2)
            assert (settings.do_sample, settings.temperature) == (True, 0.5)
    # Weights that a run saved have the digest of those that it loaded.
    whole = HuggingFaceLM(str(folder / "lm"), 290, 8, pretrained=True)
    again = HuggingFaceLM(**whole.rebuild_arguments(whole.init_args))
    again.load_state_dict(whole.state_dict())
    form = Form.of(Stored("all"), {1.0}, 290)
    loaded, saved = (TextStore(net, folder, form, 290, None, print).expected for net in (whole, again))
    assert loaded == saved
    assert loaded.keys() == {"weights"}


@with_transformers.in_fork
def test_checkpointing(folder: Path) -> None:
    """Blocks that are computed again give the same gradients; bfloat16 rounds; a pipeline refuses these models."""
    warnings.simplefilter("ignore")
    save_llama(folder)
    tokens, gradients = torch.arange(3, 19).view(2, 8), []
    for checkpointing in (False, True):
        net = HuggingFaceLM(str(folder), 290, 8, pretrained=True, checkpointing=checkpointing)
        net.train()(tokens).square().mean().backward()
        gradients.append({key: p.grad for key, p in net.named_parameters()})
    assert all(torch.equal(value, gradients[1][key]) for key, value in gradients[0].items())
    half = HuggingFaceLM(str(folder), 290, 8, pretrained=True, dtype="bfloat16").eval()
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(half(tokens).float(), net.eval()(tokens), rtol=0, atol=2e-2)
    assert bad_input(pipeline_stages, net) == (
        "net HuggingFaceLM: expected a net that can be cut: with pipeline_stages(), or an nn.Sequential"
    )
    narrow = HuggingFaceLM(str(folder), 290, 8, dtype="bfloat16", lora_rank=2)
    assert {p.dtype for p in narrow.parameters()} == {torch.float32, torch.bfloat16}
    assert {p.dtype for p in narrow.parameters() if p.requires_grad} == {torch.float32}
    narrow(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    assert bad_input(HuggingFaceLM, str(folder), 290, 8, lora_rank=-1).startswith("lora_rank -1: expected 0, or")
