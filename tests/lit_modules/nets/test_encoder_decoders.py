"""Encoder-decoders as language models: prompts into the encoder, alone = in company, cached = not, T5 and BART."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from apprentice.batch import label_mask
from apprentice.errors import BadInput
from datamodules import Chat, Recall
from experiments import gpt, kd
from lit_modules.distillation import Distillation
from lit_modules.nets import GPT, EncoderDecoder, HuggingFaceSeq2Seq
from lit_modules.nets.generation import Sampling, generate, row_keys
from lit_modules.objectives import Hinton
from lit_modules.tasks.tokens import Tokens
from tests import chats
from tests.language_parts import save_tokenizer
from tests.with_transformers import in_fork

FORMS: dict[str, dict[str, Any]] = {
    "usual": {},
    "llama": {"position": "rotary", "norm": "rms", "mlp": "swiglu", "num_kv_heads": 2, "qk_norm": True},
    "linear": {"mixer": "linear"},
}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
SIZES = {"vocab_size": 300, "d_model": 16, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 0}


def rows(lengths: Tensor, width: int, end: int) -> Tensor:
    """Rows (b, width) of tokens, each with a prompt of so many, which ends with `end`."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 50, (len(lengths), width), generator=generator)
    return tokens.scatter(1, lengths[:, None] - 1, end)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_row_alone_and_continued(form: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = EncoderDecoder(50, 20, embed_dim=32, **form).double().eval()
    lengths = torch.tensor([1, 4, 6])
    tokens = rows(lengths, 12, 4)
    whole = net(tokens)
    for row, length in enumerate(lengths.tolist()):
        alone = net(tokens[row : row + 1, :9])[0, length - 1 :]
        torch.testing.assert_close(alone, whole[row, length - 1 : 9], rtol=0, atol=1e-12)
        later = tokens[row : row + 1].clone()
        later[:, 9:] = 7
        assert torch.equal(net(later)[0, length - 1 : 9], whole[row, length - 1 : 9])  # no look at later tokens
    keys = row_keys(torch.arange(3), 1)
    written = [generate(net, tokens[:, :6], lengths, 7, keys, cached=cached).tokens for cached in (True, False)]
    assert torch.equal(*written)
    twice = tokens[:, :6].clone()
    twice[:, 0] = 4  # a prompt of two turns, of which the encoder reads the first
    two = [generate(net, twice, lengths, 7, keys, cached=cached).tokens for cached in (True, False)]
    assert torch.equal(*two)


def test_prompts_without_their_end_are_refused(tmp_path: Path) -> None:
    data = chats.chat(tmp_path)
    data.check_net(EncoderDecoder(**data.net_arguments), "`student`")
    with pytest.raises(BadInput, match="a template whose prompts end with token 0, at which `student` parts a row"):
        data.check_net(EncoderDecoder(**data.net_arguments, prompt_end=0), "`student`")


def test_what_has_no_place_is_refused() -> None:
    sizes: dict[str, Any] = {"vocab_size": 50, "block_size": 20, "embed_dim": 32}
    with pytest.raises(BadInput, match=r"balance 0.01: expected 0"):
        EncoderDecoder(**sizes, mlp="moe")
    net = EncoderDecoder(**sizes, softcap=5.0, scale=0.3)
    block: Any = net.blocks[0]
    assert block.cross.form == block.attention.form
    with pytest.raises(BadInput, match="the encoder of `student` reads prompts, which these texts have not"):
        Recall().check_net(net, "`student`")


def test_losses_are_of_the_response_alone(tmp_path: Path) -> None:
    data = chats.chat(tmp_path, batch_size=3)
    nets = [with_weights(net, data, seed) for seed, net in enumerate((GPT, EncoderDecoder))]
    module = Distillation(
        nets[0], {"kd": (nets[1], Hinton())}, data.input_shape, task=Tokens(**data.task_arguments),
        input_dtype=torch.int64, samples=data.sizes["train"],
    ).double()  # fmt: skip
    batch = next(iter(data.train_dataloader()))
    loss, _ = module.shard_step(batch)
    teacher, student = (net.double()(batch.inputs)[label_mask(batch.labels)] for net in nets)
    ce = torch.nn.functional.cross_entropy(student, batch.labels[label_mask(batch.labels)])
    p, q = ((x / 2).log_softmax(-1) for x in (teacher, student))
    expected = 0.75 * ce + 0.25 * 4 * (p.exp() * (p - q)).sum(-1).mean()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-9)


def with_weights(net: Any, data: Chat, seed: int) -> Any:
    torch.manual_seed(seed)
    return net(**data.net_arguments, num_layers=1, embed_dim=16)


def save_model(folder: Path, kind: str) -> Any:
    """A T5 or BART of two layers, with its tokenizer."""
    import transformers

    save_tokenizer(folder)
    torch.manual_seed(0)
    if kind == "t5":
        heads = {"num_layers": 2, "num_decoder_layers": 3, "num_heads": 2, "d_kv": 8, "d_ff": 24, "dropout_rate": 0.1}
        model: Any = transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES, **heads))
    else:
        parts = {"layers": 2, "attention_heads": 2, "ffn_dim": 24}
        halves = {f"{half}_{key}": value for half in ("encoder", "decoder") for key, value in parts.items()}
        config = transformers.BartConfig(
            **SIZES, **halves, max_position_embeddings=64, bos_token_id=1, forced_eos_token_id=None
        )
        model = transformers.BartForConditionalGeneration(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    model.eval().save_pretrained(folder)
    return model


@pytest.mark.extras("transformers")
@pytest.mark.parametrize("kind", ["t5", "bart"])
@in_fork
def test_models_of_transformers(kind: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, kind).double()
    net = HuggingFaceSeq2Seq(str(tmp_path), 290, 40, pretrained=True).double()
    lengths = torch.tensor([3, 5, 8])
    tokens = rows(lengths, 12, 2)
    logits = net(tokens)  # in training mode: no dropout
    for row, length in enumerate(lengths.tolist()):
        decoder = torch.cat([torch.zeros(1, dtype=torch.int64), tokens[row, length:]])[None]
        expected = model(input_ids=tokens[row : row + 1, :length], decoder_input_ids=decoder).logits[0, :, :290]
        torch.testing.assert_close(logits[row, length - 1 :], expected, rtol=0, atol=1e-10)
    prompts = tokens[:, :8]
    greedy = [generate(net, prompts, lengths, 9, None, Sampling(0.0), (2,), cached) for cached in (True, False)]
    assert torch.equal(greedy[0].tokens, greedy[1].tokens)
    for row, length in enumerate(lengths.tolist()):
        model.generation_config.suppress_tokens = [*range(290, 300)]
        theirs = model.generate(tokens[row : row + 1, :length], max_new_tokens=9, do_sample=False, use_cache=False)[
            0, 1:
        ]
        assert theirs.tolist() == greedy[0].tokens[row, : len(theirs)].tolist()


@pytest.mark.extras("transformers")
@in_fork
def test_teacher_and_student_of_a_conversation(tmp_path: Path) -> None:
    import transformers

    name, run = str(tmp_path / "t5"), tmp_path / "run"
    save_model(tmp_path / "t5", "t5")
    (tmp_path / "turns.jinja").write_text(TEMPLATE)
    chats.write_lines(tmp_path / "chat.jsonl", chats.rows(40))
    flags = f"""--data Chat --data.path {tmp_path}/chat.jsonl --data.template {tmp_path}/turns.jinja
        --data.max_length 80 --data.test_size 4 --data.validation_size 4
        --teacher HuggingFaceSeq2Seq --teacher.name {name} --teacher.pretrained true
        --student HuggingFaceSeq2Seq --student.name {name} --only ce kd gkd
        --variants.gkd GKD --variants.gkd.on_policy 0.5 --variants.gkd.max_new_tokens 3 --seeds 1
        --trainer.max_epochs 1 --out {run}"""
    small = json.dumps({"num_layers": 1, "num_decoder_layers": 1})
    kd.main([*flags.split(), "--student.config", small])
    hf = run / "seed0" / "kd" / "hf"
    assert transformers.AutoModelForSeq2SeqLM.from_pretrained(hf).config.num_decoder_layers == 1
    (code,) = re.findall(r"```python\n(.*?)```", (hf / "README.md").read_text(), re.DOTALL)
    exec(code.replace("FOLDER", str(hf)), {})
    for prompt in (["the fox"], ["the fox<|im_end|>", "--raw", "true"]):
        gpt.main(["--sample", *prompt, "--run", str(run / "seed0" / "kd")])
