"""A language model's texts are those of a plain loop, whoever shares the batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.keyed import fold_in, mix, with_seed
from lit_modules.nets import HuggingFaceLM
from lit_modules.nets.generation import Sampling, check_writer, generate, row_keys
from tests import with_transformers
from tests.language import gpt

LENGTHS = torch.tensor([3, 1, 5, 0, 4, 3])
SAMPLES = torch.tensor([7, 0, 3, 4, 90, 8])
ENDS = (2, 9)


def prompts() -> Tensor:
    """Padded on the right with noise, which must not matter."""
    return torch.randint(11, (len(LENGTHS), 7), generator=torch.Generator().manual_seed(3))


def sharp(net: nn.Module) -> nn.Module:
    """With float64 weights whose logits differ enough."""
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(4 if p.dim() > 1 else 1)
    return net.double()


def by_hand(net: nn.Module, prompt: Tensor, sample: int, new: int, seed: int, step: int, temperature: float) -> Tensor:
    """The response of one prompt (t,): all tokens again for each new one, and a search from the first token on."""
    text, key = prompt, mix((sample * 0x9E3779B1 + fold_in(seed, step)) & 0xFFFFFFFF)
    key = mix(mix(key ^ mix(0x85EBCA6B)) * 0x9E3779B1 & 0xFFFFFFFF)
    longest = getattr(net, "block_size", None) or 1000
    for place in range(min(new, longest - len(prompt))):
        u = (mix(key ^ mix((place + 1) * 0x85EBCA6B & 0xFFFFFFFF)) + 0.5) / 2**32
        p = (net(text[None])[0, -1].double() / temperature).softmax(0)
        token, total = 0, p[0]
        while total <= u * p.sum():
            token += 1
            total = total + p[token]
        text = torch.cat([text, torch.tensor([token])])
        if token in ENDS:
            break
    return text[len(prompt) :]


def check_against_loop(net: nn.Module, new: int = 9) -> None:
    texts = prompts()
    keys = row_keys(SAMPLES, 5, 2)
    written = generate(net, texts, LENGTHS, new, keys, Sampling(0.7), ENDS)
    net.eval()
    assert written.tokens.shape == (6, new)
    assert written.lengths[3] == 0  # it has no prompt
    for row in (0, 1, 2, 4, 5):
        prompt = texts[row, : LENGTHS[row]]
        with torch.no_grad():
            expected = by_hand(net, prompt, int(SAMPLES[row]), new, 5, 2, 0.7)
        assert written.tokens[row, : len(expected)].tolist() == expected.tolist()
        assert written.lengths[row] == len(expected)
        assert not written.tokens[row, len(expected) :].any()
        alone = generate(net, prompt[None], LENGTHS[row : row + 1], new, keys[row : row + 1], Sampling(0.7), ENDS)
        assert torch.equal(alone.tokens[0], written.tokens[row])
    assert written.lengths.unique().numel() > 2  # some have ended, each at its place
    again = generate(net, texts, LENGTHS, new, keys, Sampling(0.7), ENDS, cached=False)
    assert torch.equal(again.tokens, written.tokens)
    check_writer(net)


def test_a_gpts_texts_are_those_of_a_plain_loop() -> None:
    net = sharp(gpt(dropout=0.5))
    check_against_loop(net.train())
    assert net(prompts()).requires_grad  # its mode is what it was
    check_against_loop(sharp(gpt(block_size=8)))  # some rows have no room for all tokens


@pytest.mark.extras("transformers")
@with_transformers.in_fork
def test_those_of_hugging_faces_models_too(folder: Path) -> None:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 16}
    llama = transformers.LlamaConfig(
        **sizes, intermediate_size=24, num_key_value_heads=1, max_position_embeddings=12, bos_token_id=0, eos_token_id=2
    )
    gpt2 = transformers.GPT2Config(vocab_size=11, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    bloom = transformers.BloomConfig(vocab_size=11, hidden_size=16, n_layer=2, n_head=2)
    nets = {}
    for name, config in {"llama": llama, "gpt2": gpt2, "bloom": bloom}.items():
        config.save_pretrained(folder / name)
        nets[name] = sharp(with_seed(0, lambda name=name: HuggingFaceLM(str(folder / name), 11, 12)))
    check_against_loop(nets["llama"])
    check_against_loop(nets["gpt2"])
    with pytest.raises(BadInput, match="cached keys"):  # its attention to padding alone is NaN
        check_writer(nets["bloom"])
    large = HuggingFaceLM(str(folder / "llama"), 11, 12, dtype="bfloat16")
    with torch.no_grad():
        large.model.get_output_embeddings().weight.mul_(500)  # logits of 40, of which bfloat16 has every fourth
    check_writer(large)


def test_draws_follow_the_logits_and_their_options() -> None:
    z = torch.tensor([[0.1, 0.5, 0.3, 0.1]]).log().expand(4000, 4)
    u = (torch.arange(4000) + 0.5) / 4000
    counts = {
        "all": (Sampling(), [400, 2000, 1200, 400]),
        "top_k": (Sampling(top_k=2), [0, 2500, 1500, 0]),
        "ties": (Sampling(top_k=3), [400, 2000, 1200, 400]),
        "top_p": (Sampling(top_p=0.6), [0, 2500, 1500, 0]),
        "most": (Sampling(top_p=0.4), [0, 4000, 0, 0]),
        "cold": (Sampling(0.0), [0, 4000, 0, 0]),
    }
    for name, (sampling, expected) in counts.items():
        assert sampling.draw(z, u.double()).bincount(minlength=4).tolist() == pytest.approx(expected, abs=1), name
    assert Sampling().draw(torch.full((1, 4), torch.nan), u[:1].double()).item() == 3
    for options in ({"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}):
        name, value = next(iter(options.items()))
        with pytest.raises(BadInput, match=f"{name} {value}: expected"):
            Sampling(**options)  # type: ignore[arg-type]


class Shifting(nn.Module):
    """A net whose cache is wrong: it counts padding."""

    def __init__(self) -> None:
        super().__init__()
        self.net = gpt()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)

    def decoder(self, capacity: int, padding: Tensor | None) -> Any:
        return self.net.decoder(capacity, None)


def test_a_net_that_can_not_write_is_refused() -> None:
    with torch.no_grad():
        wrong = Shifting()
        wrong.net.embedding.positions.weight.mul_(100)
    with pytest.raises(BadInput, match=r"net Shifting: expected a model whose cached keys"):
        check_writer(wrong)
    with pytest.raises(BadInput, match=r"net Sequential: .*logits \(b, T, V\); it gives \(2, 4\)"):
        check_writer(nn.Sequential(nn.Embedding(4, 3), nn.Flatten(), nn.Linear(9, 4)))
