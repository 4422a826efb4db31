"""Students made of a teacher's own weights: fewer blocks, attention heads and MLP channels (Minitron, 2407.14679)."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from apprentice.batch import IGNORED
from apprentice.errors import BadInput
from lit_modules.nets.base import Net, evaluating
from lit_modules.nets.from_teacher import FromTeacher, Say
from lit_modules.nets.generation import ROUNDINGS
from lit_modules.nets.gpt import GPT
from lit_modules.nets.hugging_face import HuggingFaceLM
from lit_modules.nets.importance import Subset, TokenLoss, drop_blocks, largest, mean_inputs

# Layers of a block of Llama's kind, by what is cut: rows of weight and bias, or columns of the weight.
HEAD_ROWS = {"self_attn.q_proj": "heads", "self_attn.k_proj": "groups", "self_attn.v_proj": "groups"}
HEAD_COLUMNS = "self_attn.o_proj"
MLP_ROWS, MLP_COLUMNS = ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"
GPT2_ROWS, GPT2_COLUMNS = ("mlp.c_fc",), "mlp.c_proj"  # whose weights are transposed
TRIED = 8  # tokens


class Kept(NamedTuple):
    """What a pruned net keeps of its teacher."""

    blocks: list[int]  # in their order
    heads: list[list[int]] | None = None  # of each kept block, groups of query heads that share a key; None for all
    channels: list[list[int]] | None = None  # of each kept block, of its MLP; None for all
    loss: float | None = None  # a token, measured with these blocks; None if nothing was measured
    whole: float | None = None  # of the whole teacher on the same texts

    def __str__(self) -> str:
        ranges, first = list[str](), 0
        for end in range(1, len(self.blocks) + 1):
            if end == len(self.blocks) or self.blocks[end] != self.blocks[end - 1] + 1:
                a, b = self.blocks[first], self.blocks[end - 1]
                ranges.append(f"{a}" if a == b else f"{a}-{b}")
                first = end
        loss = "" if self.loss is None else f"; loss {self.loss:.3f} a token untrained, the whole {self.whole:.3f}"
        return f"keeps blocks {', '.join(ranges)}{loss}"


class Pruned(FromTeacher):
    """A language model made of the teacher's own weights, with fewer blocks, heads and MLP channels.

    It works for models of Llama's kind and GPT-2 of `HuggingFaceLM`, and for the blocks of `GPT`. Which blocks are left
    out is measured on a few texts that the run trains on: one after the other, the one without which the loss is
    least (see `drop_blocks`). Heads and channels are those with the largest
    activations there, the norm of a head's output and the size of a channel's (Minitron, section 2.2).

    Args:
        layers: blocks that are kept: a number of them, chosen by measured loss, or a list, the first block is 0;
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
            config = _config(teacher, "heads", self.heads)
            has, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", 0)
            if not groups or not _has(blocks[0], *HEAD_ROWS, HEAD_COLUMNS):
                raise BadInput("heads", self.heads, f"a teacher of Llama's kind; {type(config).__name__} is not")
            if getattr(config, "head_dim", None) is None:  # heads would be wider if there were fewer
                expected = f"a teacher whose configuration has head_dim; {type(config).__name__} has none"
                raise BadInput("heads", self.heads, expected)
            share = has // groups
            if not 1 <= self.heads <= has or self.heads % share:
                raise BadInput("heads", self.heads, f"1 to {has} heads, a multiple of the {share} that share a key")
            heads = [list(range(self.heads // share))] * len(numbers)
        if self.mlp is not None:
            _config(teacher, "mlp", self.mlp)
            last: Any = blocks[0].get_submodule(_mlp_output(blocks[0]))
            width = last.weight.shape[0 if _has(blocks[0], GPT2_COLUMNS) else 1]
            if not 1 <= self.mlp <= width:
                raise BadInput("mlp", self.mlp, f"1 to {width} channels, which the teacher's MLPs have")
            channels = [list(range(self.mlp))] * len(numbers)
        return Kept(numbers, heads, channels)

    def choose(self, teacher: nn.Module, tokens: Tensor, labels: Tensor, say: Say = lambda _: None) -> Kept:
        """Choose what to keep by tokens (b, T) and labels (b, T), of which -100 counts nowhere; `say` how far it is.

        Raises:
            BadInput: as `first`; or blocks of several kinds, among which none can be chosen.
        """
        kept, (path, blocks) = self.first(teacher), find_blocks(teacher)
        with evaluating(teacher):
            if isinstance(self.layers, int) and self.layers < len(blocks):
                if len({*_kinds_of_blocks(teacher)}) > 1:
                    raise BadInput("layers", self.layers, "a list of blocks: this teacher's are of several kinds")
                loss = TokenLoss(teacher, path, tokens, labels)
                numbers, least, whole = drop_blocks(loss, len(blocks), self.layers, say)
                kept = kept._replace(blocks=numbers, loss=least, whole=whole)
            left, counted = [blocks[number] for number in kept.blocks], labels != IGNORED
            with Subset(teacher, path, left):
                if kept.heads is not None:
                    config = _config(teacher, "heads", self.heads)
                    last = [block.get_submodule(HEAD_COLUMNS) for block in left]
                    norms = mean_inputs(teacher, last, partial(_head_norms, config), tokens, counted)
                    kept = kept._replace(heads=[largest(x, len(kept.heads[0])) for x in norms])
                if kept.channels is not None:
                    last = [block.get_submodule(_mlp_output(block)) for block in left]
                    sizes = mean_inputs(teacher, last, Tensor.abs, tokens, counted)
                    kept = kept._replace(channels=[largest(x, len(kept.channels[0])) for x in sizes])
        return kept

    def make(self, teacher: nn.Module, kept: Kept) -> nn.Module:
        """Return a net of the teacher's class with what is kept of its weights.

        Raises:
            BadInput: blocks of the teacher compute something else at other places.
        """
        net, (_, blocks) = _make(teacher, kept, self.lora_rank), find_blocks(teacher)
        if len(kept.blocks) < len(blocks):
            is_whole = kept.heads is None and kept.channels is None
            whole = net if is_whole else _make(teacher, kept._replace(heads=None, channels=None), self.lora_rank)
            if not _computes_as(whole, teacher, kept.blocks):
                kind = type(teacher.model if isinstance(teacher, HuggingFaceLM) else teacher).__name__
                expected = f"all blocks: those of this {kind} compute something else at other places"
                raise BadInput("layers", self.layers, expected)
        return net


def _make(teacher: nn.Module, kept: Kept, lora_rank: int) -> nn.Module:
    """Return a net of the teacher's class with what is kept of its weights, unchecked."""
    path, _ = find_blocks(teacher)
    net = _smaller(teacher, kept, lora_rank)
    if next(teacher.parameters()).dtype == torch.float64:
        net.double()
    state = dict[str, Tensor]()
    for key, value in teacher.state_dict().items():
        number, rest = _place(key, path)
        if number is None:
            state[key] = value
        elif number in kept.blocks:
            place = kept.blocks.index(number)
            state[f"{path}.{place}.{rest}"] = _cut(rest, value, kept, place, teacher)
    ours = net.state_dict()
    adapted = {key: f"{layer}.base_layer.{kind}" for key in state for layer, _, kind in [key.rpartition(".")]}
    state = {adapted[key] if adapted[key] in ours else key: value for key, value in state.items()}
    state = {key: value for key, value in ours.items() if "lora_" in key} | state
    if isinstance(teacher, GPT) and state.keys() != ours.keys():
        expected = "blocks of the kinds that a GPT of these options has at their new places"
        raise BadInput("layers", kept.blocks, expected)
    net.load_state_dict(state)
    net.kept_blocks = tuple(kept.blocks)
    return net


def _computes_as(net: nn.Module, teacher: nn.Module, kept: Sequence[int]) -> bool:
    """Return whether a net has the logits of the teacher with these of its blocks, on a few tokens."""
    path, blocks = find_blocks(teacher)
    config = teacher.model.config if isinstance(teacher, HuggingFaceLM) else None
    settings = {} if config is None else _settings_of_blocks(config, kept)
    before = {name: getattr(config, name) for name in settings}
    tokens = torch.arange(TRIED)[None] % int(cast("Net", teacher).init_args["vocab_size"])
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


def find_blocks(net: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the path and the list of a language model's blocks; BadInput if the net is none that can be pruned."""
    if isinstance(net, HuggingFaceLM) and (rank := net.init_args["lora_rank"]):
        raise BadInput("teacher.lora_rank", rank, "0: Pruned is made of a model's weights, without adapters")
    if isinstance(net, HuggingFaceLM | GPT):
        for path, module in net.named_modules():
            if isinstance(module, nn.ModuleList) and len(module):
                return path, module
    raise BadInput("teacher", type(net).__name__, "HuggingFaceLM or GPT, of whose weights Pruned is made")


def _config(net: nn.Module, option: str, value: object) -> Any:
    """Return the configuration of a model of transformers; BadInput for another net."""
    if not isinstance(net, HuggingFaceLM):
        raise BadInput(
            option, value, f"not allowed with {type(net).__name__}, of which whole blocks are kept or left out"
        )
    return net.model.config


def _kinds_of_blocks(net: nn.Module) -> list[str]:
    """Return the kinds of attention of a model's blocks, if its configuration tells them."""
    if isinstance(net, GPT):
        mixers = [block.get_submodule("attention") for block in net.blocks]
        return [f"{type(mixer).__name__} {getattr(mixer, 'window', None)}" for mixer in mixers]
    config = net.model.config if isinstance(net, HuggingFaceLM) else None
    return getattr(config, "layer_types", None) or []


def _settings_of_blocks(config: Any, blocks: Sequence[int]) -> dict[str, list[Any]]:
    """Return those settings of these blocks of which the configuration has one for each block, as `layer_types`."""
    settings = {
        name: [value[number] for number in blocks]
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == config.num_hidden_layers and not name.endswith("_token_id")
    }
    if "attention_layers" in settings and hasattr(config, "attention_types"):  # GPT-Neo's, whose short form this is
        settings["attention_types"] = [[[kind], 1] for kind in settings["attention_layers"]]
    return settings


def _head_norms(config: Any, x: Tensor) -> Tensor:
    """Return the sum of the norms of heads' outputs (n, heads * width) in each group that shares a key: (n, groups)."""
    norms = x.unflatten(1, (config.num_attention_heads, -1)).norm(dim=2)
    summed: Tensor = norms.unflatten(1, (config.num_key_value_heads, -1)).sum(2)
    return summed


def _has(block: nn.Module, *paths: str) -> bool:
    return {*paths} <= {name for name, _ in block.named_modules()}


def _mlp_output(block: nn.Module) -> str:
    """Return the path of the last layer of a block's MLP; BadInput if it is of another kind."""
    if _has(block, *MLP_ROWS, MLP_COLUMNS):
        return MLP_COLUMNS
    if _has(block, *GPT2_ROWS, GPT2_COLUMNS) and not isinstance(block.get_submodule(GPT2_COLUMNS), nn.Linear):
        return GPT2_COLUMNS
    raise BadInput("mlp", type(block).__name__, "a teacher whose blocks have the MLP of Llama or GPT-2")


def _smaller(teacher: nn.Module, kept: Kept, lora_rank: int) -> Net:
    """Return a net of the teacher's class with fewer parts, and new weights."""
    arguments = cast("Net", teacher).init_args
    if isinstance(teacher, GPT):
        softmax = [place for place, block in enumerate(kept.blocks) if block in (arguments["softmax_layers"] or ())]
        changed = {"num_layers": len(kept.blocks), "softmax_layers": softmax or None}
        try:
            return GPT(**{**arguments, **changed})
        except BadInput as fault:
            expected = f"others: with these alone {fault.argument} {fault.value} is refused, {fault.expected}"
            raise BadInput("layers", kept.blocks, expected) from None
    config = _config(teacher, "layers", None)
    changes: dict[str, Any] = {"num_hidden_layers": len(kept.blocks)}
    changes |= _settings_of_blocks(config, kept.blocks)
    if kept.heads is not None:
        groups, share = len(kept.heads[0]), config.num_attention_heads // config.num_key_value_heads
        changes |= {"num_key_value_heads": groups, "num_attention_heads": groups * share, "head_dim": config.head_dim}
    if kept.channels is not None:
        changes["n_inner" if hasattr(config, "n_inner") else "intermediate_size"] = len(kept.channels[0])
    changes = {**(arguments.get("config") or {}), **changes}
    new = {"pretrained": False, "dtype": "float32", "config": changes, "lora_rank": lora_rank}
    return HuggingFaceLM(**{**arguments, **new})


def _place(key: str, path: str) -> tuple[int | None, str]:
    """Return the number of the block that a weight belongs to, and its name there; None if it belongs to none."""
    if not key.startswith(f"{path}."):
        return None, key
    number, _, rest = key.removeprefix(f"{path}.").partition(".")
    return int(number), rest


def _cut(name: str, value: Tensor, kept: Kept, place: int, teacher: nn.Module) -> Tensor:
    """Return the part of a block's weight that is kept."""
    layer, _, kind = name.rpartition(".")
    if kept.heads is not None and layer in {*HEAD_ROWS, HEAD_COLUMNS}:
        config = _config(teacher, "heads", None)
        width = config.head_dim
        if layer not in HEAD_ROWS or HEAD_ROWS[layer] == "heads":
            width *= config.num_attention_heads // config.num_key_value_heads
        rows = [start * width + i for start in kept.heads[place] for i in range(width)]
        return _take(value, rows, 0 if layer in HEAD_ROWS else 1, kind)
    if kept.channels is not None and layer in {*MLP_ROWS, MLP_COLUMNS}:
        return _take(value, kept.channels[place], 0 if layer in MLP_ROWS else 1, kind)
    if kept.channels is not None and layer in {*GPT2_ROWS, GPT2_COLUMNS}:
        return _take(value, kept.channels[place], 1 if layer in GPT2_ROWS else 0, kind, rows=layer in GPT2_ROWS)
    return value


def _take(value: Tensor, places: Sequence[int], dim: int, kind: str, rows: bool | None = None) -> Tensor:
    """Take rows or columns of a weight; a bias has the outputs' places, or stays where inputs are cut."""
    if kind == "bias":
        return value[list(places)] if (rows if rows is not None else dim == 0) else value
    return value.index_select(dim, torch.tensor(places))
