"""Mixers of a user's own: that of docs/own-mixer.md, and some that are wrong."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "own-mixer.md"
EXAMPLE, IN_PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def mixers_of(net: Any) -> list[Any]:
    """Those of a GPT's blocks."""
    return [block.attention for block in net.blocks]


def example_mixer() -> Any:
    """The page's class."""
    module = ModuleType("page_mixer")
    exec(compile(EXAMPLE, PAGE.name, "exec"), vars(module))
    sys.modules[module.__name__] = module  # whence nets are rebuilt
    return module.Mean


WRONG = '''
import torch
from torch import nn

from mymixer import Mean


class Plain(nn.Module):
    """It has a forward alone."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        return self.out(x.cumsum(1))


class Silent(nn.Module):
    """It has no forward."""


class Half(Plain):
    def forward(self, x):
        return super().forward(x)[..., ::2]


class Ahead(Plain):
    def forward(self, x):
        return self.out(x.mean(1, keepdim=True).expand_as(x))


class Deaf(Plain):
    """It makes a cache, and takes none."""

    def new_cache(self, max_length, padding=None):
        return []


class Forgetful(Mean):
    """Its cache holds nothing."""

    def forward(self, x, cache=None):
        return super().forward(x)


class Number:
    """It is no module."""

    def __init__(self, embed_dim):
        pass


def make(embed_dim: int) -> nn.Module:
    return Mean(embed_dim)


def bare(embed_dim):
    return Mean(embed_dim)
'''
