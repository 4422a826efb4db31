"""What `Pruned` keeps of a net's weights, and smaller nets that have them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.attention.positions import Position
from lit_modules.nets.base import Net
from lit_modules.nets.gpt import GPT
from lit_modules.nets.hugging_face import HuggingFaceLM
from lit_modules.nets.hugging_face_reranker import HuggingFaceReranker
from lit_modules.nets.hugging_face_text import HuggingFaceText
from lit_modules.nets.specs import rebuild

# Layers of a block of Llama's kind, by what is cut: rows of weight and bias, or columns of the weight.
HEAD_ROWS = {"self_attn.q_proj": "heads", "self_attn.k_proj": "groups", "self_attn.v_proj": "groups"}
HEAD_COLUMNS = "self_attn.o_proj"
HEAD_NORM = "self_attn.q_norm"  # of each head, or of all at once
MLP_ROWS, MLP_COLUMNS = ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"
GPT2_ROWS, GPT2_COLUMNS = ("mlp.c_fc",), "mlp.c_proj"  # whose weights are transposed
Encoder = HuggingFaceText | HuggingFaceReranker


class Kept(NamedTuple):
    """What a pruned net keeps of its teacher."""

    blocks: list[int]  # in their order
    heads: list[list[int]] | None = None  # of each kept block, groups of query heads that share a key; None for all
    channels: list[list[int]] | None = None  # of each kept block, of its MLP; None for all
    loss: float | None = None  # a token, measured with these blocks; None if nothing was measured
    whole: float | None = None  # of the whole teacher on the same texts
    distance: float | None = None  # in place of the loss, of an encoder's outputs from the whole teacher's

    def __str__(self) -> str:
        ranges, first = list[str](), 0
        for end in range(1, len(self.blocks) + 1):
            if end == len(self.blocks) or self.blocks[end] != self.blocks[end - 1] + 1:
                a, b = self.blocks[first], self.blocks[end - 1]
                ranges.append(f"{a}" if a == b else f"{a}-{b}")
                first = end
        loss = "" if self.loss is None else f"; loss {self.loss:.3f} a token untrained, the whole {self.whole:.3f}"
        distance = "" if self.distance is None else f"; {self.distance:.3f} from the whole, untrained"
        return f"keeps blocks {', '.join(ranges)}{loss}{distance}"


def make_smaller(teacher: nn.Module, kept: Kept, lora_rank: int) -> nn.Module:
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
    if isinstance(teacher, GPT):
        kinds = [kinds_of_blocks(teacher)[number] for number in kept.blocks]
        if state.keys() != ours.keys() or kinds_of_blocks(net) != kinds:
            expected = "blocks of the kinds that a GPT of these options has at their new places"
            raise BadInput("layers", kept.blocks, expected)
    net.load_state_dict(state)
    net.kept_blocks = tuple(kept.blocks)
    return net


def find_blocks(net: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the path and the list of a net's blocks; BadInput if it is none that can be pruned."""
    if isinstance(net, HuggingFaceLM) and (rank := net.init_args["lora_rank"]):
        raise BadInput("teacher.lora_rank", rank, "0: Pruned is made of a model's weights, without adapters")
    if isinstance(net, Encoder) and net.stages:
        path = net.stages[0].rpartition(".")[0]
        return path, cast("nn.ModuleList", net.get_submodule(path))
    if isinstance(net, HuggingFaceLM | GPT):
        for path, module in net.named_modules():
            if isinstance(module, nn.ModuleList) and len(module):
                return path, module
    expected = "HuggingFaceLM, GPT, HuggingFaceText or HuggingFaceReranker, of whose weights Pruned is made"
    raise BadInput("teacher", type(net).__name__, expected)


def config_of(net: nn.Module, option: str, value: object) -> Any:
    """Return the configuration of a model of transformers; BadInput for another net."""
    if not isinstance(net, HuggingFaceLM):
        raise BadInput(
            option, value, f"not allowed with {type(net).__name__}, of which whole blocks are kept or left out"
        )
    return net.model.config


def kinds_of_blocks(net: nn.Module) -> list[str]:
    """Return the kinds of attention of a model's blocks, if its configuration tells them."""
    if isinstance(net, GPT):
        mixers = [block.get_submodule("attention") for block in net.blocks]
        return [f"{type(mixer).__name__} {getattr(mixer, 'window', None)} {_position(mixer)}" for mixer in mixers]
    config = net.model.config if isinstance(net, HuggingFaceLM | Encoder) else None
    return getattr(config, "layer_types", None) or []


def _position(mixer: nn.Module) -> Position | None:
    position = getattr(mixer, "position", None)
    return position if isinstance(position, Position) else None


def settings_of_blocks(config: Any, blocks: Sequence[int]) -> dict[str, list[Any]]:
    """Return those settings of these blocks of which the configuration has one for each block, as `layer_types`."""
    settings = {
        name: [value[number] for number in blocks]
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == config.num_hidden_layers and not name.endswith("_token_id")
    }
    if "attention_layers" in settings and hasattr(config, "attention_types"):  # GPT-Neo's, whose short form this is
        settings["attention_types"] = [[[kind], 1] for kind in settings["attention_layers"]]
    return settings


def head_norms(config: Any, x: Tensor) -> Tensor:
    """Return the sum of the norms of heads' outputs (n, heads * width) in each group that shares a key: (n, groups)."""
    norms = x.unflatten(1, (config.num_attention_heads, -1)).norm(dim=2)
    summed: Tensor = norms.unflatten(1, (config.num_key_value_heads, -1)).sum(2)
    return summed


def has_layers(block: nn.Module, *paths: str) -> bool:
    """Return whether a block has submodules at all these paths."""
    return {*paths} <= {name for name, _ in block.named_modules()}


def mlp_output(block: nn.Module) -> str:
    """Return the path of the last layer of a block's MLP; BadInput if it is of another kind."""
    if has_layers(block, *MLP_ROWS, MLP_COLUMNS):
        return MLP_COLUMNS
    if has_layers(block, *GPT2_ROWS, GPT2_COLUMNS) and not isinstance(block.get_submodule(GPT2_COLUMNS), nn.Linear):
        return GPT2_COLUMNS
    raise BadInput("mlp", type(block).__name__, "a teacher whose blocks have the MLP of Llama or GPT-2")


def _smaller(teacher: nn.Module, kept: Kept, lora_rank: int) -> Net:
    """Return a net of the teacher's class with fewer parts, and new weights."""
    arguments = cast("Net", teacher).init_args
    if isinstance(teacher, GPT):
        softmax = [place for place, block in enumerate(kept.blocks) if block in (arguments["softmax_layers"] or ())]
        changed = {"num_layers": len(kept.blocks), "softmax_layers": softmax or None}
        try:
            return GPT(**rebuild({**arguments, **changed}))
        except BadInput as fault:
            expected = f"others: with these alone {fault.argument} {fault.value} is refused, {fault.expected}"
            raise BadInput("layers", kept.blocks, expected) from None
    config = cast("Any", teacher).model.config
    changes: dict[str, Any] = {"num_hidden_layers": len(kept.blocks)}
    changes |= settings_of_blocks(config, kept.blocks)
    if kept.heads is not None:
        groups, share = len(kept.heads[0]), config.num_attention_heads // config.num_key_value_heads
        changes |= {"num_key_value_heads": groups, "num_attention_heads": groups * share, "head_dim": config.head_dim}
    if kept.channels is not None:
        changes["n_inner" if hasattr(config, "n_inner") else "intermediate_size"] = len(kept.channels[0])
    changes = {**(arguments.get("config") or {}), **changes}
    if isinstance(teacher, Encoder):
        return type(teacher)(**{**arguments, "pretrained": False, "config": changes})
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
        config = config_of(teacher, "heads", None)
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
