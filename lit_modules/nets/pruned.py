"""Students made of a teacher's own weights: fewer blocks, attention heads and MLP channels (Minitron, 2407.14679)."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from apprentice.batch import IGNORED
from apprentice.errors import BadInput
from lit_modules.nets.base import Net, evaluating
from lit_modules.nets.embedder import Embedder
from lit_modules.nets.from_teacher import FromTeacher, Say
from lit_modules.nets.generation import ROUNDINGS
from lit_modules.nets.hugging_face import HuggingFaceLM
from lit_modules.nets.importance import Distance, Subset, TokenLoss, drop_blocks, largest, mean_inputs
from lit_modules.nets.pruned_weights import (
    GPT2_COLUMNS,
    HEAD_COLUMNS,
    HEAD_NORM,
    HEAD_ROWS,
    Encoder,
    Kept,
    config_of,
    find_blocks,
    has_layers,
    head_norms,
    kinds_of_blocks,
    make_smaller,
    mlp_output,
    settings_of_blocks,
)

TRIED = 8  # tokens


class Pruned(FromTeacher):
    """A model of texts made of the teacher's own weights, with fewer blocks, heads and MLP channels.

    It works for models of Llama's kind and GPT-2 of `HuggingFaceLM`, and for the blocks of `GPT`, `HuggingFaceText` and
    `HuggingFaceReranker`. Which blocks are left out is measured on a few texts that the run trains on: one after the
    other, the one without which the loss is least, or the outputs of an encoder are nearest to the teacher's (see
    `drop_blocks`). Heads and channels are those with the largest activations there, the norm of a head's output and
    the size of a channel's (Minitron, section 2.2).

    Args:
        layers: blocks that are kept: a number of them, chosen by what is measured, or a list, the first block is 0;
            default: all.
        heads: query heads that each block keeps; those that share keys stay together; default: all.
        mlp: channels that each block's MLP keeps; default: all.
        lora_rank: train only adapters of this rank, as those of `HuggingFaceLM`, beside what is kept; 0 trains all.

    Raises:
        BadInput: the teacher is of another kind, or has fewer of them.
    """

    plan_class, kind = Kept, "pruned"

    def __init__(
        self,
        layers: int | list[int] | None = None,
        heads: int | None = None,
        mlp: int | None = None,
        lora_rank: int = 0,
    ) -> None:
        super().__init__()
        if layers is None and heads is None and mlp is None:
            raise BadInput("layers", None, "a number of blocks, or `heads` or `mlp`: what to leave out")
        self.layers, self.heads, self.mlp, self.lora_rank = layers, heads, mlp, lora_rank

    def first(self, teacher: nn.Module) -> Kept:
        """Return what a net of this size may keep, without measuring: to check the options and the net's shape.

        Raises:
            BadInput: an option can't be used with this teacher.
        """
        teacher = _held(teacher)
        _, blocks = find_blocks(teacher)
        if self.lora_rank and not isinstance(teacher, HuggingFaceLM):
            raise BadInput(
                "lora_rank", self.lora_rank, f"0 for a {type(teacher).__name__}, or a HuggingFaceLM as teacher"
            )
        count, kept = len(blocks), self.layers
        if isinstance(kept, list):
            if not kept or sorted({*kept}) != kept or not 0 <= kept[0] <= kept[-1] < count:
                raise BadInput("layers", kept, f"blocks in their order, each once, from 0 to {count - 1}")
        elif kept is not None and not 1 <= kept <= count:
            raise BadInput("layers", kept, f"1 to {count} blocks, which the teacher has")
        numbers = kept if isinstance(kept, list) else list(range(kept or count))
        heads, channels = None, None
        if self.heads is not None:
            config = config_of(teacher, "heads", self.heads)
            has, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", 0)
            if not groups or not has_layers(blocks[0], *HEAD_ROWS, HEAD_COLUMNS):
                raise BadInput("heads", self.heads, f"a teacher of Llama's kind; {type(config).__name__} is not")
            if getattr(config, "head_dim", None) is None:  # heads would be wider if there were fewer
                expected = f"a teacher whose configuration has head_dim; {type(config).__name__} has none"
                raise BadInput("heads", self.heads, expected)
            if (
                has_layers(blocks[0], HEAD_NORM)
                and len(blocks[0].get_parameter(f"{HEAD_NORM}.weight")) > config.head_dim
            ):
                raise BadInput("heads", self.heads, f"all {has} heads: this teacher norms them together")
            share = has // groups
            if not 1 <= self.heads <= has or self.heads % share:
                raise BadInput("heads", self.heads, f"1 to {has} heads, a multiple of the {share} that share a key")
            heads = [list(range(self.heads // share))] * len(numbers)
        if self.mlp is not None:
            config_of(teacher, "mlp", self.mlp)
            last: Any = blocks[0].get_submodule(mlp_output(blocks[0]))
            width = last.weight.shape[0 if has_layers(blocks[0], GPT2_COLUMNS) else 1]
            if not 1 <= self.mlp <= width:
                raise BadInput("mlp", self.mlp, f"1 to {width} channels, which the teacher's MLPs have")
            channels = [list(range(self.mlp))] * len(numbers)
        return Kept(numbers, heads, channels)

    def choose(self, teacher: nn.Module, tokens: Tensor, labels: Tensor, say: Say = lambda _: None) -> Kept:
        """Choose what to keep by tokens (b, T) and labels (b, T), of which -100 counts nowhere; `say` how far it is.

        Of an encoder, by texts (b, k, L).

        Raises:
            BadInput: as `first`; or blocks of several kinds, among which none can be chosen.
        """
        teacher = _held(teacher)
        kept, (path, blocks) = self.first(teacher), find_blocks(teacher)
        with evaluating(teacher):
            if isinstance(self.layers, int) and self.layers < len(blocks):
                if len({*kinds_of_blocks(teacher)}) > 1:
                    raise BadInput("layers", self.layers, "a list of blocks: this teacher's are of several kinds")
                if isinstance(teacher, Encoder):
                    distance = Distance(teacher, path, tokens)
                    numbers, least, _ = drop_blocks(distance, len(blocks), self.layers, say)
                    return kept._replace(blocks=numbers, distance=least)
                loss = TokenLoss(teacher, path, tokens, labels)
                numbers, least, whole = drop_blocks(loss, len(blocks), self.layers, say)
                kept = kept._replace(blocks=numbers, loss=least, whole=whole)
            left, counted = [blocks[number] for number in kept.blocks], labels != IGNORED
            with Subset(teacher, path, left):
                if kept.heads is not None:
                    config = config_of(teacher, "heads", self.heads)
                    last = [block.get_submodule(HEAD_COLUMNS) for block in left]
                    norms = mean_inputs(teacher, last, partial(head_norms, config), tokens, counted)
                    kept = kept._replace(heads=[largest(x, len(kept.heads[0])) for x in norms])
                if kept.channels is not None:
                    last = [block.get_submodule(mlp_output(block)) for block in left]
                    sizes = mean_inputs(teacher, last, Tensor.abs, tokens, counted)
                    kept = kept._replace(channels=[largest(x, len(kept.channels[0])) for x in sizes])
        return kept

    def make(self, teacher: nn.Module, kept: Kept) -> nn.Module:
        """Return a net of the teacher's class with what is kept of its weights.

        Raises:
            BadInput: blocks of the teacher compute something else at other places.
        """
        if isinstance(teacher, Embedder):
            return teacher.with_net(self.make(teacher.net, kept))
        teacher = _held(teacher)
        net, (_, blocks) = make_smaller(teacher, kept, self.lora_rank), find_blocks(teacher)
        if len(kept.blocks) < len(blocks):
            is_whole = kept.heads is None and kept.channels is None
            whole = net if is_whole else make_smaller(teacher, kept._replace(heads=None, channels=None), self.lora_rank)
            if not _computes_as(whole, teacher, kept.blocks):
                kind = type(getattr(teacher, "model", teacher)).__name__
                expected = f"all blocks: those of this {kind} compute something else at other places"
                raise BadInput("layers", self.layers, expected)
        return net


def _held(teacher: nn.Module) -> nn.Module:
    """Return the net whose weights are cut, without what holds it."""
    if isinstance(teacher, HuggingFaceLM) and teacher.shared_tokens is not None:
        return teacher.in_tokens(teacher.vocab_size, None)  # the student's tokens have the teacher's numbers
    return teacher.net if isinstance(teacher, Embedder) else teacher


def _computes_as(net: nn.Module, teacher: nn.Module, kept: Sequence[int]) -> bool:
    """Return whether a net has the outputs of the teacher with these of its blocks, on a few tokens."""
    path, blocks = find_blocks(teacher)
    config = teacher.model.config if isinstance(teacher, HuggingFaceLM | Encoder) else None
    settings = {} if config is None else settings_of_blocks(config, kept)
    before = {name: getattr(config, name) for name in settings}
    tokens = torch.arange(TRIED)[None] % int(cast("Net", teacher).init_args.get("vocab_size", TRIED))
    if isinstance(teacher, Encoder):
        tokens = (tokens + ord("a")).byte()[:, None].expand(-1, 2, -1)  # a text twice
    try:
        for name, value in settings.items():  # the model reads some of them, too
            setattr(config, name, value)
        with evaluating(teacher), evaluating(net), Subset(teacher, path, [blocks[number] for number in kept]):
            expected, logits = teacher(tokens), net(tokens)
    finally:
        for name, value in before.items():
            setattr(config, name, value)
    rounding = 1e-4 if expected.dtype.itemsize > 2 else ROUNDINGS * torch.finfo(expected.dtype).eps
    return bool((logits - expected).abs().max() <= rounding * expected.abs().max())
