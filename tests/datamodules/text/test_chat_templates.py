"""Chat templates of Hugging Face: the tokens that an assistant generates are learned, or the template is refused."""

import contextlib
import io
import json
import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from apprentice.errors import BadInput
from datamodules import Chat, Subwords, Vocabulary
from datamodules.text.chat_templates import ChatTemplate
from datamodules.text.conversations import Conversation
from datamodules.text.marked_turns import MarkedTurns, TokenizedConversation
from experiments import kd
from lit_modules.nets import HuggingFaceLM
from lit_modules.nets.layers import check_keeps_apart
from tests import with_transformers
from tests.chats import rows, write_lines
from tests.commands import bad_input, results
from tests.language_parts import TEMPLATE, save_llama, save_tokenizer

pytestmark = pytest.mark.extras("transformers")

TURNS = [("system", "the dog"), ("user", "the fox"), ("assistant", "jumps"), ("user", "over"), ("assistant", "lazy ")]
MARKED = TEMPLATE.replace(
    "{{ m['content'] }}<|im_end|>\n",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m['content'] }}<|im_end|>{% endif %}\n",
)
LAST_ALONE = (  # marks its last turn, so that the first turns are other ones within the whole
    "{% for m in messages %}{{ '!' if loop.last else '' }}<|im_start|>{{ m['role'] }}\n{{ m['content'].strip() }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (  # a turn ends where the next begins
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
COUNTS = (  # what it renders of one turn changes with another
    "{% for m in messages %}{{ messages|length }}{{ messages[-1]['content']|length }}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>{% endfor %}"
)
UNMARKED = MARKED.replace("== 'assistant'", "== 'model'")  # marks the turns of a role that there is not
CROSSED = (  # marks begin within a token
    "{% for m in messages %}{% if m['role'] == 'assistant' %}qui{% generation %}{{ m['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
SPACE = (  # no end token, and a prompt that ends within a token
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SILENT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n<|im_end|>{% endfor %}"


def conversation(*turns: tuple[str, str]) -> Conversation:
    return Conversation("line 1", tuple({"role": role, "content": text} for role, text in turns or TURNS))


def learned(template: ChatTemplate, encoded: TokenizedConversation) -> str:
    return str(template.tokenizer.decode(encoded.tokens[encoded.learned], skip_special_tokens=False))


@with_transformers.in_fork
def test_the_assistants_turns_are_learned(folder: Path) -> None:
    warnings.simplefilter("ignore")
    save_tokenizer(folder)
    words = Subwords(str(folder))

    def text(template: str | None, *turns: tuple[str, str]) -> str:
        made = ChatTemplate(words, template)
        return learned(made, made.encode(conversation(*turns)))

    for made in (ChatTemplate(words), ChatTemplate(words, MARKED), MarkedTurns(Vocabulary())):
        tokens = made.encode(conversation()).tokens.tolist()
        for turn in (2, 4):  # a prompt is what stands in the whole before what is learned
            prompt = made.prompt(conversation().messages[:turn]).tolist()
            assert prompt == tokens[: len(prompt)]
            assert made.encode(conversation(*TURNS[: turn + 1])._replace(prompted=turn)).learned.argmax() == len(prompt)
    critic = conversation(("critic", "a")).messages
    assert "a role that the template knows" in bad_input(ChatTemplate(words).prompt, critic)
    whole = "jumps<|im_end|>lazy <|im_end|>"  # without the new line after the end token, which is never generated
    assert text(None) == text(MARKED) == whole
    for template in (None, MARKED):  # the bytes of contents, where a character may have several tokens
        encoded = ChatTemplate(words, template).encode(conversation(("user", "grün"), ("assistant", "jümps 🦊 over")))
        assert encoded.sizes[encoded.learned].sum() == len("jümps 🦊 over".encode())
    assert text(LAST_ALONE) == whole.replace("lazy ", "lazy")
    assert text(HEADERS, *TURNS[1:4]) == " jumps<|im_start|>"
    assert "renders the first turns" in bad_input(text, COUNTS)
    assert "shows the contents of turns" in bad_input(text, SILENT)
    assert "of line 1 it says: no" in bad_input(text, "{{ raise_exception('no') }}")
    assert "it marks nothing of a turn" in bad_input(ChatTemplate(words, UNMARKED).ends)
    assert ChatTemplate(words, SPACE).ends() == (2,)
    crossing = ChatTemplate(words, CROSSED)
    encoded = crossing.encode(conversation(("user", "fox"), ("assistant", "ck dog")))
    assert (encoded.cut, learned(crossing, encoded)) == (1, " dog<|im_end|>")
    for made in (ChatTemplate(words), ChatTemplate(words, MARKED)):
        encoded = made.encode(conversation()._replace(prompted=4))
        assert learned(made, encoded) == "lazy <|im_end|>"
        assert encoded.sizes[encoded.learned].sum() == len("lazy ")
    _faults(words)
    template = ChatTemplate(words)
    template.template = None
    assert template.ends() == template.ends_of_texts() == (2,)
    assert "`data.template FILE` brings one" in bad_input(template.encode, conversation())
    plain = template.encode(Conversation("line 1", (), "the fox"))
    assert learned(template, plain) == "the fox<|im_end|>"

    border = ChatTemplate(words, TEMPLATE.replace("<|im_start|>assistant\n", "qui").replace("<|im_start|>{{", "{{"))
    crossed = border.encode(conversation(("user", "fox"), ("assistant", "ck dog")))
    assert crossed.cut <= 2


def _faults(words: Subwords) -> None:
    dates = "{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"
    one, other = (ChatTemplate(words, date + TEMPLATE).encode(conversation()).tokens.tolist() for date in dates)
    assert one == other  # on any day
    assert "strftime_now of a text" in bad_input(ChatTemplate, words, "{{ strftime_now(format) }}" + TEMPLATE)
    words.tokenizer.chat_template = {"tools": SILENT, "default": TEMPLATE}
    assert ChatTemplate(words).template == TEMPLATE
    words.tokenizer.chat_template = {"tools": SILENT, "rag": SILENT}
    assert "one called default; it has tools, rag" in bad_input(ChatTemplate, words)
    words.tokenizer.chat_template = TEMPLATE
    lone = conversation(("user", "\ud800"), ("assistant", "a"))
    assert "takes the text of line 1" in bad_input(ChatTemplate(words).encode, lone)
    whole, words.tokenizer = words.tokenizer, lambda text, **_: {"input_ids": [1]}
    assert "takes the text of a" in bad_input(_of(words, whole)._tokenize, "a", [], "a")
    words.tokenizer = whole


def _of(slow: Subwords, fast: Any) -> ChatTemplate:
    """A template whose tokenizer does not say where its tokens stand."""
    tokenizer, slow.tokenizer = slow.tokenizer, fast
    made = ChatTemplate(slow)
    made.tokenizer = tokenizer
    return made


def _hybrid(kind: str, folder: Path) -> HuggingFaceLM:
    import transformers

    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": 1}
    more: dict[str, dict[str, Any]] = {
        "Lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
        "FalconH1": {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
        },
    }
    getattr(transformers, f"{kind}Config")(**sizes, **heads, **more[kind]).save_pretrained(folder)
    return HuggingFaceLM(str(folder), 61, 64)


@with_transformers.in_fork
def test_a_chat_in_the_tokens_of_a_llama(folder: Path) -> None:
    """A set in the tokens of a Llama, whose end token is its pad token: packed as filled up, and a whole run."""
    warnings.simplefilter("ignore")
    save_llama(folder / "hf", max_position_embeddings=128)
    path = write_lines(folder / "chat.jsonl", rows(30))
    options: dict[str, Any] = {"tokenizer": str(folder / "hf"), "max_length": 128, "validation_size": 3, "test_size": 3}
    data = Chat(path, batch_size=24, **options)
    (batch,) = data.train_dataloader()
    assert ((batch.labels == 2).sum(1) == 1).all()  # each end token, and no pad
    (packed,) = Chat(path, batch_size=24, pack=True, **options).train_dataloader()
    assert len(packed.inputs) < len(batch.inputs)

    net = HuggingFaceLM(str(folder / "hf"), data.num_classes, 128, pretrained=True).double()
    check_keeps_apart(net, "teacher")
    save_llama(folder / "window", max_position_embeddings=128, sliding_window=16)
    narrow = HuggingFaceLM(str(folder / "window"), data.num_classes, 128)
    assert "a window of 16 tokens, fewer than `data.max_length`" in bad_input(check_keeps_apart, narrow, "teacher")
    for kind in ("Lfm2", "FalconH1"):  # a new net of few channels, whose convolutions mix the texts of a row
        assert "mixes the texts of a row" in bad_input(check_keeps_apart, _hybrid(kind, folder / kind), "student")
    losses, gradients = [], []
    for rows_of in (batch, packed):
        net.zero_grad()
        logits = net(rows_of.inputs, rows_of.starts) if rows_of.starts is not None else net(rows_of.inputs)
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows_of.labels.flatten()))
        losses[-1].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    torch.testing.assert_close(*losses, rtol=0, atol=1e-9)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)

    flags = ["--data", "Chat", "--data.path", str(path), "--data.pack", "true", "--data.max_length", "128"]
    nets = ["--teacher", "HuggingFaceLM", "--teacher.name", str(folder / "hf"), "--teacher.pretrained", "true"]
    nets += ["--student", "GPT", "--student.num_layers", "1", "--student.embed_dim", "8"]
    common = ["--seeds", "1", "--only", "ce", "kd", "--trainer.max_epochs", "1", "--out", str(folder / "run")]
    kd.main([*flags, *nets, *common])
    assert results(folder / "run")["students"]["kd"]["test_loss"][0] > 0
    config = json.loads((folder / "run" / "seed0" / "kd" / "hf" / "generation_config.json").read_text())
    assert config["eos_token_id"] == list(data.end_tokens) == [2]


@with_transformers.in_fork
def test_what_can_not_be_used_is_refused(folder: Path) -> None:
    """Templates and models that can't be used, each refused by its flag before anything is trained."""
    warnings.simplefilter("ignore")
    save_llama(folder / "hf", max_position_embeddings=128)
    save_tokenizer(folder / "words")
    (folder / "syntax.jinja").write_text("{% for m in messages")
    path = write_lines(folder / "chat.jsonl", rows(30))
    faulty = Chat(path, tokenizer=str(folder / "words"), template=folder / "syntax.jinja")
    assert bad_input(faulty.setup).startswith(f"data.template {folder / 'syntax.jinja'}: expected one that takes")

    (folder / "hf" / "model.safetensors").rename(folder / "moved")
    options = ["--data", "Chat", "--data.path", str(path), "--data.max_length", "128", "--student", "GPT"]
    teacher = ["--teacher", "HuggingFaceLM", "--teacher.name", str(folder / "hf"), "--teacher.pretrained", "true"]

    def refused(*flags: str) -> str:
        with pytest.raises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as said:
            kd.main([*options, *teacher, "--seeds", "1", "--out", str(folder / "run"), *flags])
        (line,) = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
        return line

    line = refused()
    assert line.startswith("error: --teacher.name")
    assert "model.safetensors" in line
    (folder / "moved").rename(folder / "hf" / "model.safetensors")
    assert refused("--data.tokenizer", "bytes").startswith("error: --data.tokenizer bytes: expected")
    assert "--data.template" in refused("--data.template", str(folder / "syntax.jinja"))


SPECIAL = re.compile(r"<[|｜][^>'\"{}]*?[|｜]>|<(?:start|end)_of_\w+>|</?s>|\[/?INST\]|<\|?turn\|?>|<\|im_end\|>")
CASES = {
    "one": TURNS[1:3],
    "system": TURNS[:3],
    "several": TURNS[1:],
    "spaces": [("user", "the fox"), ("assistant", " jumps \n")],
}


@pytest.mark.slow
@pytest.mark.extras("transformers", "trl")
@with_transformers.in_fork
def test_templates_of_trl(folder: Path) -> None:
    """TRL's templates: without marks as with them, but for white space and empty thoughts; or refused."""
    warnings.simplefilter("ignore")
    save_tokenizer(folder)
    spec = find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations
    templates = Path(spec.submodule_search_locations[0]) / "chat_templates"
    same = refused = 0
    for marked in sorted(templates.glob("*_training.jinja")):
        usual, words = templates / marked.name.replace("_training", ""), Subwords(str(folder))
        names = sorted(set(SPECIAL.findall(usual.read_text())))
        words.tokenizer.add_special_tokens({"additional_special_tokens": names})
        ours, theirs = (ChatTemplate(words, file.read_text()) for file in (usual, marked))
        for turns in CASES.values():
            try:
                texts = [learned(t, t.encode(conversation(*turns))) for t in (ours, theirs)]
            except BadInput:
                refused += 1
                continue
            thoughts = re.compile(r"<think>|</think>|\s|<\|im_start\|>")
            plain = [thoughts.sub("", text) for text in texts]
            assert all((content.strip() in texts[0]) == (role == "assistant") for role, content in turns), texts
            same += plain[0] == plain[1]
    assert same >= 85, (same, refused)
