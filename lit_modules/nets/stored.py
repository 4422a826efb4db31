"""Stand-ins for a teacher: for one whose outputs are all in files, and for none."""

import copy
from collections.abc import Collection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.base import Net
from lit_modules.nets.outputs import EMBEDDINGS
from lit_modules.nets.outputs import Outputs as NetOutputs

READ_OUTPUTS = "lit_modules.nets.output_file.outputs_of"  # imported for a file of a user's


class TeacherWithoutWeights(Net):
    """A teacher without weights, which can't be asked."""

    is_trained = True
    is_comparable = False


class NoTeacher(TeacherWithoutWeights):
    """Stands where nets learn from labels alone."""

    def forward(self, inputs: Tensor) -> Tensor:
        raise BadInput("teacher", "None", "a teacher, as a student asks it")

    def pipeline_stages(self) -> list[nn.Module]:
        return [nn.Identity()]


class StoredTeacher(TeacherWithoutWeights):
    """A teacher that is not loaded: a run reads its outputs for the training texts from a file.

    It tells their shape, and can't be asked for any other.

    Args:
        vocab_size: number of tokens, V.
        teacher: what the file says of the teacher: a hash of where its weights come from.
    """

    def __init__(self, vocab_size: int, teacher: str) -> None:
        super().__init__()
        self.vocab_size, self.teacher = vocab_size, teacher

    def zeros(self, tokens: Tensor) -> Tensor:
        """(B, T, V) zeros in the place of logits of tokens (B, T), for checks of shapes."""
        return torch.zeros(*tokens.shape, self.vocab_size, device=tokens.device)

    def forward(self, tokens: Tensor) -> Tensor:
        raise BadInput("teacher", type(self).__name__, "a net with weights; of this one a run had stored outputs alone")


class Outputs(TeacherWithoutWeights):
    """A teacher whose outputs for a data set's samples are in a file of the user's: see `lit_modules.nets.output_file`.

    It may be behind an API, in ONNX or of scikit-learn. It is not asked: outputs are found by a sample's place in its
    set, so the samples that train have to be the same in each epoch, and all of them in the file.

    Attributes:
        parts: outputs (n, C) of the samples of `train`, `validation` and `test` by these names, in their order; a part
            of which the file lacks samples is left out. Known after `of_data`.
        note: what a user may want to know of the classes; "" for nothing.

    Args:
        file: npz or Parquet.
    """

    feature_layer = ""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file, self.parts, self.note = file, dict[str, Tensor](), ""
        self.output = nn.Identity()  # a layer, for objectives that relate samples by the teacher's embeddings

    def of_data(self, data: Any, kind: str, wanted: Collection[str] = ("train",)) -> "Outputs":
        """Return a copy with the outputs for the samples of a data module, whose nets give outputs of this kind.

        Raises:
            BadInput: training changes the samples, or the file can't be read or lacks a sample of a wanted part.
        """
        bound = copy.copy(self)
        bound.parts, bound.note = resolve_name(READ_OUTPUTS)(Path(self.file).expanduser(), data, kind, wanted)
        bound.pooled_layer = "output" if kind == EMBEDDINGS else ""
        bound.is_comparable = "test" in bound.parts
        return bound

    def part(self, name: str) -> Tensor:
        """Return the outputs (n, C) of a part; BadInput before `of_data`."""
        if not self.parts:
            raise BadInput("teacher", "Outputs", "the outputs of a data set's samples, found by `of_data`")
        return self.parts[name]

    @property
    def width(self) -> int:
        """Values of an output."""
        return self.part("train").shape[1]

    def rows(self, part: str, index: Tensor, layers: Collection[str] = ()) -> NetOutputs:
        """Return the outputs (b, C) of a part's samples at these places (b,), and as features of these layers."""
        return self._as_outputs(self.part(part)[index.cpu()].to(index.device), layers)

    def zeros(self, inputs: Tensor, layers: Collection[str] = ()) -> NetOutputs:
        """Return zeros in the place of outputs for inputs (b, ...), for checks of shapes."""
        like = self.part("train")
        return self._as_outputs(like.new_zeros(len(inputs), self.width).to(inputs.device), layers)

    def _as_outputs(self, outputs: Tensor, layers: Collection[str]) -> NetOutputs:
        return NetOutputs(outputs, dict.fromkeys(layers, outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        raise BadInput("teacher", "Outputs", f"a net with weights; of this one there are outputs alone, in {self.file}")
