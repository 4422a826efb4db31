"""What fills rows up, at either end, changes no logits of a text's own tokens."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from lit_modules.nets import HuggingFaceLM
from lit_modules.nets.generation import _decoder
from tests import with_transformers
from tests.language import gpt
from tests.language_parts import save_llama

V, T = 11, 8
LENGTHS = torch.tensor([8, 3, 1, 5])


def check(net: nn.Module) -> None:
    """A text by itself, filled up with noise at its end, and at its beginning before tokens that come one by one."""
    g = torch.Generator().manual_seed(1)
    texts, noise = (torch.randint(V, (len(LENGTHS), T), generator=g) for _ in range(2))
    inside = torch.arange(T) < LENGTHS[:, None]
    filled = net(texts.where(inside, noise))  # (b, T, V)
    padding = T - LENGTHS
    places = torch.arange(T) - padding[:, None]
    decode = _decoder(net, T, padding)
    shifted = torch.where(places >= 0, texts.gather(1, places.clamp(min=0)), noise)
    steps = torch.stack([decode(shifted[:, place : place + 1]) for place in range(T)], 1)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = net(texts[row : row + 1, :length])[0]
        torch.testing.assert_close(filled[row, :length], alone, rtol=0, atol=1e-9)
        torch.testing.assert_close(steps[row, T - length :], alone, rtol=0, atol=1e-9)


@torch.no_grad()
def test_of_a_gpt() -> None:
    check(gpt(vocab_size=V, block_size=T).double().eval())


@pytest.mark.extras("transformers")
@with_transformers.in_fork
def test_of_a_llama(folder: Path) -> None:
    warnings.simplefilter("ignore")
    save_llama(folder)
    with torch.no_grad():
        check(HuggingFaceLM(str(folder), V, T).double().eval())
