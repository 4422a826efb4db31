"""Students with a teacher's weights and other attention (LoLCATs, 2410.10254; MOHAWK, 2408.10189)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.batch import label_mask
from apprentice.errors import BadInput
from lit_modules.nets.attention.linear import FeatureMap
from lit_modules.nets.base import evaluating
from lit_modules.nets.block_options import RECURRENT, ROTARY, SOFTMAX, TAKEN, BlockOptions, MakeMixer, name_of
from lit_modules.nets.from_teacher import FromTeacher, Say
from lit_modules.nets.gpt import GPT
from lit_modules.nets.hugging_face import HuggingFaceLM
from lit_modules.nets.layers import INPUT, run
from lit_modules.nets.specs import rebuild

ReplacementName = Literal["windowed", "linear", "gated", "delta"]
ALIGNED, RATE = 20, 1e-2  # steps of Adam by which mixers are aligned before one by one is measured, and their rate


class Replaced(NamedTuple):
    """Which blocks of a teacher keep their softmax attention."""

    softmax_layers: list[int]  # in their order
    divergences: list[float] | None = (
        None  # of each block, in nats a token, if it were replaced alone; None: unmeasured
    )

    def __str__(self) -> str:
        kept = f"softmax in blocks {', '.join(map(str, self.softmax_layers))}" if self.softmax_layers else "no softmax"
        if self.divergences is None:
            return kept
        measured = ", ".join(f"{value:.4f}" for value in self.divergences)
        return f"{kept}; KL to the teacher with one block replaced: {measured}"


class Mixer(FromTeacher):
    """A GPT with a teacher's weights, whose softmax attention is replaced in all blocks or most: a hybrid.

    The projections to queries, keys, values and out are the teacher's, too; what the new attention has beside these
    begins with noise, and what it has no place for, such as `qk_norm`, is left out. `Linearize` trains it. The teacher
    is a `GPT` with softmax attention, or a `HuggingFaceLM` of a family that `GPT.from_hf` reads, as Llama.

    With a number of `softmax_layers` those stay whose replacement costs most: on a few texts that the run trains on,
    each block's new attention is aligned with the teacher's for 20 steps, and takes its place alone; the blocks
    with the largest KL(teacher || this net) stay. A student with blocks chosen by KL is better than with every n-th one
    (2512.20569).

    Args:
        mixer: windowed (softmax in a window, linear beyond it: LoLCATs), linear, gated (GLA) or delta (Gated DeltaNet).
            Or a class or function of your own that makes a `TokenMixer`, whose layers `qkv` and `out` have the
            teacher's weights if it has such, of the teacher's shapes.
        softmax_layers: blocks that keep their attention: a number of them, or a list, the first is 0; default: none.
        window: of windowed: a token and the `window` - 1 before it; default: 64.
        feature_map: elu, hedgehog or taylor; default: hedgehog of windowed, elu of linear.
        conv: width of the short convolution of linear, gated and delta; default: 4 of delta, 0 of the others.

    Raises:
        BadInput: the teacher is of another kind, or this attention can't have its weights.
    """

    plan_class, kind = Replaced, "mixer"

    def __init__(
        self,
        mixer: ReplacementName | MakeMixer = "windowed",
        softmax_layers: int | list[int] | None = None,
        window: int | None = None,
        feature_map: FeatureMap | None = None,
        conv: int | None = None,
    ) -> None:
        super().__init__()
        if mixer not in get_args(ReplacementName) and not callable(mixer):
            raise BadInput("mixer", mixer, f"one of {', '.join(get_args(ReplacementName))}, or a class of your own")
        if window is not None and mixer != "windowed":
            raise BadInput("window", window, f"null, or mixer=windowed; {name_of(mixer)} has none")
        self.mixer, self.softmax_layers = mixer, softmax_layers
        self.options = {"window": window, "feature_map": feature_map, "conv": conv}
        block_options: dict[str, Any] = self.options
        BlockOptions(embed_dim=64, num_heads=1, causal=True, mixer=mixer, **block_options)  # or an option is refused

    def first(self, teacher: nn.Module) -> Replaced:
        layers, count = self.softmax_layers, len(_stages_of(teacher))
        if isinstance(layers, list):
            if sorted({*layers}) != layers or not all(0 <= number < count for number in layers) or len(layers) == count:
                raise BadInput(
                    "softmax_layers", layers, f"some blocks in their order, each once, from 0 to {count - 1}"
                )
        elif layers is not None and not 0 <= layers < count:
            raise BadInput("softmax_layers", layers, f"0 to {count - 1} of the {count} blocks that the teacher has")
        chosen = layers if isinstance(layers, list) else list(range(layers or 0))
        self._settings(_as_gpt(teacher), chosen)
        return Replaced(chosen)

    def choose(self, teacher: nn.Module, tokens: Tensor, labels: Tensor, say: Say = lambda _: None) -> Replaced:
        plan, count = self.first(teacher), self.softmax_layers
        if not isinstance(count, int) or not count:
            return plan
        softmax, counted = _as_gpt(teacher), label_mask(labels)
        mixers = [_mixer_of(block) for block in self.make(teacher, Replaced([])).blocks]
        numbers = range(len(mixers))
        ends = f"attention{INPUT}", "attention"
        paths = {f"blocks.{number}{end}" for number in numbers for end in (INPUT, *(f".{end}" for end in ends))}
        with evaluating(softmax):
            expected = run(softmax, tokens, paths)
        log_t, divergences = expected.logits[counted].log_softmax(-1), list[float]()
        for number, mixer in enumerate(mixers):
            x, y = (expected.features[f"blocks.{number}.{end}"] for end in ends)
            _align(mixer, x, y, counted)
            with evaluating(softmax), _in_place(softmax, number, mixer):
                log_s = softmax.end(expected.features[f"blocks.{number}{INPUT}"], number, counted).log_softmax(-1)
            divergences.append(F.kl_div(log_s, log_t, reduction="batchmean", log_target=True).item())
            say(f"measured {number + 1} of {len(mixers)} blocks: KL {divergences[-1]:.4f} nats a token")
        largest = sorted(numbers, key=lambda number: -divergences[number])[:count]
        return Replaced(sorted(largest), divergences)

    def make(self, teacher: nn.Module, plan: Replaced) -> GPT:
        """Return a GPT with the teacher's weights, and other attention in all blocks but those of the plan."""
        softmax = _as_gpt(teacher)
        net, theirs = GPT(**self._settings(softmax, plan.softmax_layers)), softmax.state_dict()
        net.to(softmax.embedding.tokens.weight.dtype)
        state = net.state_dict()
        for key in state.keys() & theirs.keys():
            value, (_, _, path) = theirs[key], key.partition("blocks.")
            if "attention.qkv." in path and state[key].shape != value.shape:
                value = _repeat_groups(value, _mixer_of(softmax.blocks[int(path.partition(".")[0])]))
            if state[key].shape == value.shape or isinstance(self.mixer, str):
                state[key] = value
        net.load_state_dict(state)
        return net

    def _settings(self, softmax: GPT, layers: Sequence[int]) -> dict[str, Any]:
        """Return the student's arguments; BadInput if this attention can't have the teacher's weights."""
        settings: dict[str, Any] = {**softmax.init_args}
        if settings.get("mixer") != "softmax":
            raise BadInput("teacher.mixer", name_of(rebuild(settings.get("mixer"))), "softmax, which is replaced")
        width, heads = settings["embed_dim"], settings["num_heads"]
        if self.mixer in RECURRENT and (settings["head_dim"] or width // heads) * heads != width:
            expected = f"windowed for a teacher whose heads are {settings['head_dim']} wide, and not {width} / {heads}"
            raise BadInput("mixer", self.mixer, expected)
        if self.mixer == "windowed" and settings["window"] is not None:
            expected = f"linear, gated or delta for a teacher that attends in windows of {settings['window']}"
            raise BadInput("mixer", self.mixer, expected)
        if self.mixer in RECURRENT and settings["qkv_bias"] not in {None, settings["bias"]}:
            expected = "windowed for a teacher whose queries, keys and values alone have biases"
            raise BadInput("mixer", self.mixer, expected)
        if settings["nope_every"] is not None:
            expected = "null: a teacher with positions in all blocks"
            raise BadInput("teacher.nope_every", settings["nope_every"], expected)
        defaults = GPT.defaults()
        if not layers:  # what only softmax attention has
            taken = TAKEN.get(self.mixer, ()) if isinstance(self.mixer, str) else ()
            settings |= {name: defaults[name] for name in SOFTMAX if name not in taken}
            if self.mixer != "windowed" and settings["position"] in {"rotary", "alibi"}:
                settings |= {"position": None, **{name: defaults[name] for name in ROTARY}}
        settings |= {name: value for name, value in self.options.items() if value is not None}
        settings |= {"mixer": self.mixer, "softmax_layers": [*layers] or None}
        try:
            with torch.device("meta"):
                GPT(**settings)
        except BadInput as fault:
            if fault.argument == "mixer":
                raise
            expected = f"one that fits the teacher: {fault.argument} {fault.value}, where it takes {fault.expected}"
            raise BadInput("mixer", name_of(self.mixer), expected) from None
        return settings


def _stages_of(teacher: nn.Module) -> tuple[str, ...]:
    """Return the paths of a teacher's blocks; BadInput if it is none whose attention can be replaced."""
    if isinstance(teacher, HuggingFaceLM) and (rank := teacher.init_args["lora_rank"]):
        raise BadInput("teacher.lora_rank", rank, "0: Mixer is made of a model's weights, without adapters")
    if not isinstance(teacher, GPT | HuggingFaceLM):
        raise BadInput("teacher", type(teacher).__name__, "GPT or HuggingFaceLM, of whose weights Mixer is made")
    return teacher.stages


def _as_gpt(teacher: nn.Module) -> GPT:
    """Return the teacher, or a GPT with its weights and as many tokens."""
    _stages_of(teacher)
    if isinstance(teacher, GPT):
        return teacher
    assert isinstance(teacher, HuggingFaceLM)
    softmax, tokens = GPT.from_hf(teacher.model).float(), teacher.vocab_size
    rows = softmax.init_args["vocab_size"]
    if tokens > rows:
        expected = f"one with at most {rows:,}, for which the teacher has rows, beside Mixer"
        raise BadInput("data.tokenizer", f"{tokens:,} tokens", expected)
    if tokens == rows:
        return softmax
    net, state = GPT(**{**softmax.init_args, "vocab_size": tokens}), softmax.state_dict()
    cut = ("embedding.tokens.weight", "head.weight")  # models are padded at the end
    net.load_state_dict({key: value[:tokens] if key in cut else value for key, value in state.items()})
    return net


def _mixer_of(block: nn.Module) -> Any:
    return block.get_submodule("attention")


def _repeat_groups(value: Tensor, softmax: Any) -> Tensor:
    """Give each head of queries its own rows of keys and values (rows, ...), which groups of heads share."""
    groups = softmax.num_heads // softmax.num_kv_heads
    query, *shared = value.split([n * softmax.head_dim for n in (softmax.num_heads, *(softmax.num_kv_heads,) * 2)])
    parts = (x.unflatten(0, (-1, softmax.head_dim)).repeat_interleave(groups, 0).flatten(0, 1) for x in shared)
    return torch.cat([query, *parts])


@torch.enable_grad()
def _align(mixer: nn.Module, x: Tensor, y: Tensor, counted: Tensor) -> None:
    """Train a mixer to give y (b, T, D) for x (b, T, D), where it counts (b, T)."""
    if not (parameters := [*mixer.parameters()]):
        return
    optimizer, mask = torch.optim.Adam(parameters, lr=RATE), counted[..., None].to(y.dtype)
    for _ in range(ALIGNED):
        optimizer.zero_grad()
        ((mixer(x) - y).square() * mask).sum().backward()
        optimizer.step()


@contextmanager
def _in_place(net: GPT, number: int, mixer: nn.Module) -> Iterator[None]:
    """Inside, a block of the net has this mixer."""
    block = net.blocks[number]
    before = _mixer_of(block)
    try:
        block.attention = mixer
        yield
    finally:
        block.attention = before
