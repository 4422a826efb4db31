"""Models of transformers by name or from a folder (T. Wolf et al. 2020, "Transformers"), an optional dependency."""

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.adapters import add_adapters
from lit_modules.nets.attention.masks import mask_texts
from lit_modules.nets.base import Net, Shape, check_tokens, image_shape
from lit_modules.nets.classes import classes_of
from lit_modules.nets.generation import Decoder
from lit_modules.nets.hugging_face_encoder import (
    Pool,
    check_pool,
    encoder_config,
    encoder_options,
    leave_out_unused,
    pool_tokens,
)
from lit_modules.nets.layers import observe
from lit_modules.nets.own_tokens import OwnTokens, check_model, read_dtype
from lit_modules.nets.shared_tokens import SharedTokens
from lit_modules.nets.tokens import TokenGrid
from lit_modules.nets.transformers_models import SAFE, change_config, find_block_paths, import_transformers, load_model
from lit_modules.nets.weights import load_backbone


class HuggingFace(Net):
    """An image classifier of transformers, or the encoder that `AutoModel` makes of it.

    `stages` are the layers of its encoder whose outputs the model gives as hidden states: the last of each size of
    maps, or all blocks of tokens. `token_grid` is that of its patch embedding. The feature layer is the last stage or,
    of an encoder, what gives its last hidden state.

    Args:
        name: a model of the hub, or a folder that `save_pretrained` wrote; its configuration is read again to rebuild
            the net.
        pretrained: start with its weights; a head of another size stays new.
        embeds: give embeddings (B, D), no logits. Images of another size than the model's have its embeddings of
            positions interpolated.
        pool: what an embedding is: the model's `pooler_output`, if it has one, else its class token, else the mean of
            its patches; `cls`, the class token; or `mean`.

    Raises:
        Missing: transformers is not installed.
        BadInput: no such model, or it can't be made for these images, or its weights don't fit them.
    """

    untrained = MappingProxyType({"pretrained": False})

    def __init__(
        self, name: str, input_shape: Shape = (3, 32, 32), num_classes: int = 10, pretrained: bool = False,
        embeds: bool = False, pool: Pool = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        self.embeds, self.pool = embeds, pool
        if pool != "auto" and not embeds:
            raise BadInput("pool", pool, "not allowed for a classifier, which has its own")
        kind = "encoder" if embeds else "classifier"
        with import_transformers(name, f"an image {kind} that can be made for {tuple(input_shape)} images") as library:
            config = library.AutoConfig.from_pretrained(name, num_labels=num_classes, **SAFE)
            make = self._make_encoder if embeds else self._make_classifier
            make(library, config, name, image_shape(input_shape), pretrained)
            if pretrained:
                self.expects = read_normalization(library, name, input_shape[0])

    def _make_classifier(self, library: Any, config: Any, name: str, input_shape: Shape, pretrained: bool) -> None:
        channels, height, width = input_shape
        size = height if height == width else (height, width)
        for option, value in {"num_channels": channels, "image_size": size}.items():
            if hasattr(config, option):
                setattr(config, option, value)
        kind = library.AutoModelForImageClassification
        self.model: nn.Module = kind.from_config(config, dtype=torch.float32)
        whole, missing = load_model(kind, name) if pretrained else (None, [])
        self.stages, self.token_grid, *_ = _find_layers(self.model, self._run, input_shape)
        self.feature_layer = self.stages[-1] if self.stages else ""
        linear = [key for key, layer in self.model.named_modules() if isinstance(layer, nn.Linear)]
        head = linear[-1] if linear else ""
        if whole is not None:
            if lacks := [key for key in missing if not key.startswith(f"{head}.")]:
                raise BadInput("name", name, f"a model with all its weights; it has no {lacks[0]}")
            try:
                has_head = load_backbone(self.model, whole.state_dict(), head, name) and not missing
            except BadInput as fault:
                raise BadInput("pretrained", True, f"{fault.expected}, for {tuple(input_shape)} images") from None
            self.class_names = classes_of(whole) if has_head else None
        self.pooled_layer = f"model.{head}<"

    def _make_encoder(self, library: Any, config: Any, name: str, input_shape: Shape, pretrained: bool) -> None:
        config, missing = encoder_config(config, input_shape[0]), list[str]()
        if pretrained:
            self.model, missing = load_model(library.AutoModel, name, config=config)
        else:
            self.model = library.AutoModel.from_config(config, dtype=torch.float32)
        if lacks := leave_out_unused(self.model, missing, self.pool):
            raise BadInput("name", name, f"a model with all its weights; it has no {lacks[0]}")
        self.unused_weights = "model.classifier.", "classifier."  # in files of a classifier
        self.stages, self.token_grid, output, last = _find_layers(self.model, self._run, input_shape)
        check_pool(output, self.token_grid, self.pool)
        has_places = self.token_grid is not None or output.last_hidden_state.dim() == 4
        self.feature_layer = last if has_places else self.stages[-1] if self.stages else ""

    def _run(self, images: Tensor, **options: Any) -> Any:
        """Return the model's output, as transformers has it."""
        if self.embeds:
            parameters: Any = inspect.signature(self.model.forward).parameters
            options |= encoder_options(self.model.config, parameters, images)
        return self.model(images, **options)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) or, of an encoder, embeddings (B, D), of images (B, C, H, W)."""
        output = self._run(images)
        result: Tensor = pool_tokens(output, self.token_grid, self.pool) if self.embeds else output.logits
        return result


class HuggingFaceLM(OwnTokens, Net):
    """A causal language model of transformers, for the tokens of its own tokenizer: `data.tokenizer NAME`.

    `stages` are its blocks. Logits beyond the data's vocabulary, with which some models are padded, are cut off. With
    its weights it is a trained teacher, as if `teacher_ckpt` had loaded it.

    Args:
        name: a model of the hub, or a folder that `save_pretrained` wrote; its configuration is read again to rebuild
            the net.
        vocab_size: number of tokens, V.
        block_size: tokens of a text at most, T.
        pretrained: start with its weights, not with new ones.
        config: changes to its configuration, as {"num_hidden_layers": 2, "hidden_size": 96}: a smaller model of the
            same family, with new weights. `Pruned` keeps the teacher's weights.
        dtype: of its weights. In bfloat16 they take half the memory, for a teacher, or beside adapters; weights that
            are trained are float32.
        checkpointing: store only the inputs of its blocks for backward, and compute these again.
        lora_rank: train only adapters of this rank beside all linear layers of its blocks, of twice that scale (LoRA,
            Hu et al. 2021, by the package peft); 0 trains all weights.

    Raises:
        Missing: transformers is not installed.
        BadInput: no such model, or one for fewer tokens or shorter texts, or a configuration that it can't have.
    """

    shared_tokens: SharedTokens | None = None  # of a model that is asked in another tokenizer's tokens

    def __init__(
        self, name: str, vocab_size: int, block_size: int, pretrained: bool = False,
        config: dict[str, Any] | None = None, dtype: Literal["float32", "bfloat16"] = "float32",
        checkpointing: bool = False, lora_rank: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        of_weights = read_dtype(dtype, config, pretrained)
        self.name, self.vocab_size = name, vocab_size
        with import_transformers(name, "a causal language model") as transformers:
            settings = transformers.AutoConfig.from_pretrained(name, **SAFE)
            change_config(settings, config or {})
            kind = transformers.AutoModelForCausalLM
            self.model: Any  # a PreTrainedModel of transformers
            if pretrained:
                self.model, missing = load_model(kind, name, of_weights)
                self.tokenizer = name
            else:
                self.model, missing = kind.from_config(settings, dtype=of_weights), []
            self._takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters
            self._window, self._longest = getattr(settings, "sliding_window", None) or math.inf, block_size - 1
            self.stages = find_block_paths(self.model)
            if lora_rank:
                add_adapters(self.model, lora_rank)
            if checkpointing:
                self.model.gradient_checkpointing_enable()
            with torch.no_grad():
                texts = torch.tensor([[0, 0], [0, 1]])
                first, second = self.model.eval()(input_ids=texts, use_cache=False).logits[:, 0]
            self.model.train()
        if not torch.allclose(first, second, atol=1e-4):
            raise BadInput("name", name, "a causal language model; this one looks at later tokens")
        self.block_size = check_model(name, settings, missing, vocab_size, block_size)

    def forward(self, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of tokens (B, T), integers of any type; rows are filled up at their ends alone.

        Of rows with several texts, `starts` (B, T) has the place of each token's first one: it is at position 0, and
        texts don't attend to one another. BadInput if the model can't do so.
        """
        return self.order(self.row_logits(tokens, starts))

    def row_logits(self, tokens: Tensor, starts: Tensor | None = None) -> Tensor:
        """Logits (B, T, rows) of all rows of the model's vocabulary, also of those that stand for no token."""
        check_tokens(tokens, starts)
        tokens = tokens if self.shared_tokens is None else self.shared_tokens.read(tokens)
        options: dict[str, Tensor] = {}
        if self._takes_positions:
            places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            options["position_ids"] = places if starts is None else places - starts
        if starts is not None:
            if not self._takes_positions or self._window < max(self._longest, tokens.shape[1]):
                expected = f"false: {type(self.model).__name__} has no positions of its texts, or attends in a window"
                expected += f" of {self._window:,} tokens, fewer than `data.max_length`" * (self._window < math.inf)
                raise BadInput("data.pack", True, expected)
            kind = next(self.model.parameters()).dtype
            apart = torch.zeros((), dtype=kind, device=tokens.device)
            options["attention_mask"] = apart.where(mask_texts(starts), torch.finfo(kind).min)
        logits: Tensor = self.model(input_ids=tokens.long(), use_cache=False, **options).logits
        return logits

    def order(self, logits: Tensor) -> Tensor:
        """Return the logits (..., V) of the data's tokens, of those of all rows."""
        return logits[..., : self.vocab_size] if self.shared_tokens is None else self.shared_tokens.order(logits)

    def decoder(self, capacity: int, padding: Tensor | None) -> Decoder:
        """Return what `generate` of `lit_modules.nets.generation` asks for the next logits."""
        past = Past(self.model, self.order, self.block_size, padding)
        if (shared := self.shared_tokens) is None:
            return past
        return lambda tokens: past(shared.read(tokens))

    def in_tokens(self, vocab_size: int, shared: SharedTokens | None) -> "HuggingFaceLM":
        """Return this net, with the same weights, for V tokens of another tokenizer, or of its own numbers."""
        net = copy.copy(self)
        net.vocab_size, net.shared_tokens = vocab_size, shared
        net.init_args = {**self.init_args, "vocab_size": vocab_size}
        return net


class Past:
    """A decoder of a causal language model of transformers, with its own cache; positions are always passed.

    Args:
        model: of transformers.
        order: from its logits to those of the data's tokens.
        block_size: positions that the model has, if these end.
        padding: (b,) int64, tokens before the first of each text; None for none.
    """

    def __init__(
        self, model: nn.Module, order: Callable[[Tensor], Tensor], block_size: int | None, padding: Tensor | None
    ) -> None:
        self.model, self.order, self.padding = model, order, padding
        self.last_place = None if block_size is None else block_size - 1
        self.length, self.past = 0, None
        self.accepts = inspect.signature(model.forward).parameters

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits (b, V) after the last of tokens (b, t), which follow those of earlier calls."""
        start, self.length = self.length, self.length + tokens.shape[1]
        slots = torch.arange(self.length, device=tokens.device)[None]
        places, options = slots[:, start:].expand(len(tokens), -1), dict[str, Any]()
        if self.padding is not None:
            options["attention_mask"] = (slots >= self.padding[:, None]).long()
            places = places - self.padding[:, None]
        if "position_ids" in self.accepts:  # rows that have ended may be beyond the last
            options["position_ids"] = places.clamp(0, self.last_place)
        if "logits_to_keep" in self.accepts:
            options["logits_to_keep"] = 1
        output = self.model(input_ids=tokens, past_key_values=self.past, use_cache=True, **options)
        self.past = output.past_key_values
        return self.order(output.logits[:, -1])


class Layers(NamedTuple):
    """What a run of a model tells of its layers."""

    stages: tuple[str, ...]
    grid: TokenGrid | None  # where the tokens of its patches stand
    output: Any
    last: str  # the layer that gives its last hidden state; "" if there is none


@torch.no_grad()
def _find_layers(model: nn.Module, run: Callable[..., Any], input_shape: Shape) -> Layers:
    """Run a model of images once, which may fail, and find its layers.

    Three images differ in their first and last patches, so that the embedded tokens tell which are the patches'.
    """
    layers = {path: module for path, module in model.named_modules() if path}
    channels, height, width = input_shape
    projection = next((m for m in layers.values() if isinstance(m, nn.Conv2d)), None)  # of patches, in a transformer
    side = projection.kernel_size if projection is not None else (1, 1)
    images = torch.rand(1, channels, height, width, generator=torch.Generator().manual_seed(0)).repeat(3, 1, 1, 1)
    images[1, :, : side[0], : side[1]] += 1
    images[2, :, -(height % side[0] + 1) :, -(width % side[1] + 1) :] += 1
    parameters = inspect.signature(model.forward).parameters
    asks = {"output_hidden_states", "kwargs"} & parameters.keys()
    model.eval()
    with observe(layers) as outputs:
        output = run(images, **({"output_hidden_states": True} if asks else {}))
    model.train()
    states = getattr(output, "hidden_states", None) or ()
    paths = [path for state in states if (path := _find_source(outputs, state))]
    sizes = [outputs[path].shape[2:] if outputs[path].dim() == 4 else number for number, path in enumerate(paths)]
    stages = tuple({size: f"model.{path}" for size, path in zip(sizes, paths, strict=True)}.values())
    state = getattr(output, "last_hidden_state", None)
    last = next((f"model.{path}" for path, given in outputs.items() if state is not None and given is state), "")
    if projection is None or projection.kernel_size != projection.stride or not states or states[0].dim() != 3:
        return Layers(stages, None, output, last)
    rows, columns = (size // step for size, step in zip((height, width), side, strict=True))
    changed = [(states[0][row] != states[0][0]).any(1).nonzero().flatten().tolist() for row in (1, 2)]
    before = states[0].shape[1] - rows * columns
    is_known = changed == [[before], [before + rows * columns - 1]]
    return Layers(stages, TokenGrid(rows, columns, before) if is_known else None, output, last)


def _find_source(outputs: Mapping[str, Any], state: Tensor) -> str | None:
    """Return the outermost member of a list of layers whose output is this hidden state; None if there is none."""
    same = [path for path, output in outputs.items() if output is state]
    inside = [path for path in same if same[0].startswith(path)]  # around the one that computes it
    return min((path for path in inside if path.rpartition(".")[2].isdigit()), key=len, default=None)


def read_normalization(transformers: Any, name: str, channels: int) -> dict[str, tuple[float, ...]]:
    """Return `mean` and `std` of the images that the weights were trained on, if the model says so."""
    try:
        processor, _ = transformers.ImageProcessingMixin.get_image_processor_dict(name)
    except OSError:
        return {}
    if not processor.get("do_normalize", True):
        return {"mean": (0.0,) * channels, "std": (1.0,) * channels}
    expected = {key: tuple(processor[f"image_{key}"]) for key in ("mean", "std") if f"image_{key}" in processor}
    if processor.get("include_top") and "std" in expected:  # EfficientNet's processor divides by the deviation twice
        expected["std"] = tuple(value**2 for value in expected["std"])
    return expected
