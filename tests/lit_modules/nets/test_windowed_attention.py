"""Softmax in a window and linear attention beyond it: the formula, token by token, in every form."""

import pytest
import torch
from torch import Tensor

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from lit_modules.nets.attention.masks import mask_texts
from lit_modules.nets.attention.positions import Rotary
from lit_modules.nets.attention.softmax import SelfAttention
from lit_modules.nets.attention.windowed import WindowedLinearAttention
from tests.attention import noise

B, T, D, H = 2, 13, 12, 3


def layer(window: int = 5, chunk: int = 4, **options: object) -> WindowedLinearAttention:
    def make() -> WindowedLinearAttention:
        made = WindowedLinearAttention(D, H, window, chunk=chunk, **options).double()  # type: ignore[arg-type]
        for p in made.parameters():
            torch.nn.init.normal_(p, std=0.6)
        return made

    return with_seed(1, make)


def by_hand(made: WindowedLinearAttention, x: Tensor) -> Tensor:
    """One text (T, D) to (T, D), token by token."""
    sizes = [n * made.head_dim for n in (made.num_heads, made.num_kv_heads, made.num_kv_heads)]
    query, key, value = (part.unflatten(-1, (-1, made.head_dim)) for part in made.qkv(x).split(sizes, -1))
    if made.position is not None:
        query, key = made.position.rotate(torch.arange(len(x)), query, key)
    group, outputs = made.num_heads // made.num_kv_heads, []
    maps = made.query_map(query.transpose(0, 1)), made.key_map(key.repeat_interleave(group, 1).transpose(0, 1))
    for i in range(len(x)):
        heads = []
        for h in range(made.num_heads):
            scores = key[: i + 1, h // group] @ query[i, h] * made.scale
            near = [j for j in range(i + 1) if i - j < made.window] if made.part != "linear" else []
            far = [j for j in range(i + 1) if j not in near] if made.part != "window" else []
            largest = max([scores[j] for j in near], default=torch.zeros(()))
            share = made.window_share[h].sigmoid()
            weights = {j: share * (scores[j] - largest.detach()).exp() for j in near}
            weights |= {j: maps[0][h, i] @ maps[1][h, j] for j in far}
            total = sum(weights.values(), start=torch.zeros(()))
            heads.append(sum(w * value[j, h // group] for j, w in weights.items()) / total)
        outputs.append(torch.cat(heads))
    return made.out(torch.stack(outputs))


FORMS = {
    "plain": {},
    "one": {"window": 1},
    "none": {"window": 0, "feature_map": "elu"},
    "long": {"window": 40},
    "chunk": {"chunk": 7, "feature_map": "taylor"},
    "grouped": {"num_kv_heads": 1, "head_dim": 6, "position": Rotary(100.0), "bias": False, "scale": 0.3},
}


@pytest.mark.parametrize("part", ["both", "window", "linear"])
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_the_formulas(form: str, part: str) -> None:
    made, x = layer(**FORMS[form]), noise(B, T, D).requires_grad_()
    made.part = part  # type: ignore[assignment]
    if part == "window" and not made.window:
        return
    expected = torch.stack([by_hand(made, row) for row in x])
    torch.testing.assert_close(made(x), expected, rtol=0, atol=1e-12)
    wanted = torch.autograd.grad(expected.square().sum(), [x, *made.parameters()], allow_unused=True)
    got = torch.autograd.grad(made(x).square().sum(), [x, *made.parameters()], allow_unused=True)
    for a, b in zip(got, wanted, strict=True):
        pair = [torch.zeros(1).double() if gradient is None else gradient for gradient in (a, b)]
        torch.testing.assert_close(*torch.broadcast_tensors(*pair), rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_packed_texts_and_padding_change_nothing(form: str) -> None:
    made, x, lengths = layer(**FORMS[form]), noise(1, T, D), [3, 5, 1, 4]
    texts = x[0].split(lengths)
    alone = torch.cat([made(text[None])[0] for text in texts])
    starts = torch.repeat_interleave(torch.tensor([0, 3, 8, 9]), torch.tensor(lengths))[None]
    for mask in (starts, mask_texts(starts)):
        torch.testing.assert_close(made(x, mask=mask)[0], alone, rtol=0, atol=1e-12)
    for padding in (2, 7):
        kept = (torch.arange(T) >= padding)[None]
        torch.testing.assert_close(made(x, mask=kept)[0, padding:], made(x[:, padding:])[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("steps", [[1] * T, [5, 1, 1, 6], [T], [2, 2, 9]])
@pytest.mark.parametrize("form", FORMS)
def test_token_by_token_as_at_once(form: str, steps: list[int]) -> None:
    made, x, padding = layer(**FORMS[form]), noise(B, T, D), torch.tensor([0, 6])
    with torch.no_grad():
        plain, padded = made.new_cache(T), made.new_cache(T, padding)
        one = torch.cat([made(part, plain) for part in x.split(steps, 1)], 1)
        torch.testing.assert_close(one, made(x), rtol=0, atol=1e-12)
        other = torch.cat([made(part, padded) for part in x.split(steps, 1)], 1)
        for row, first in enumerate(padding.tolist()):
            torch.testing.assert_close(other[row, first:], made(x[row : row + 1, first:])[0], rtol=0, atol=1e-12)
        assert plain.length == T
        assert plain.held == min(T, max(made.window - 1, 0))


def test_a_window_as_long_as_the_text_is_softmax_attention() -> None:
    options = {"num_kv_heads": 1, "position": Rotary()}
    made, softmax = layer(window=T, **options), SelfAttention(D, H, causal=True, **options).double()
    softmax.load_state_dict({key: x for key, x in made.state_dict().items() if key.startswith(("qkv.", "out."))})
    torch.testing.assert_close(made(noise(B, T, D)), softmax(noise(B, T, D)), rtol=0, atol=1e-12)


def test_weights_are_those_of_the_output() -> None:
    made, x = layer(num_kv_heads=1), noise(B, T, D)
    weights = made.weights(x)
    value = made.qkv(x)[..., -made.head_dim :]
    assert not weights.triu(1).any()
    mixed = torch.einsum("bhij,bjd->bihd", weights, value).flatten(2)
    torch.testing.assert_close(made.out(mixed), made(x), rtol=0, atol=1e-12)


def test_the_cache_does_not_grow_and_what_can_not_be_is_refused() -> None:
    made = layer()
    assert made.cache_bytes(100, 4) == made.cache_bytes(5, 4) > made.cache_bytes(1, 4)
    for options, name in (({"window": -1}, "window"), ({"feature_map": "x"}, "feature_map"), ({"chunk": 0}, "chunk")):
        with pytest.raises(BadInput) as fault:
            WindowedLinearAttention(D, H, **options)  # type: ignore[arg-type]
        assert fault.value.argument == name
    cache = made.new_cache(T)
    with pytest.raises(BadInput, match="a cache holds no gradients"):
        made(noise(B, 2, D), cache), made(noise(B, 2, D), cache)
    with torch.no_grad():
        made(noise(B, 2, D), cache := made.new_cache(T))
        with pytest.raises(BadInput, match="3 texts"):
            made(noise(3, 2, D), cache)
        with pytest.raises(BadInput, match="None beside a cache"):
            made(noise(B, 2, D), cache, torch.ones(B, 2, dtype=torch.bool))
