"""Stand-ins for a teacher: for one whose outputs are all in files, and for none."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.base import Net
from lit_modules.nets.outputs import Outputs


class TeacherWithoutWeights(Net):
    """A teacher without weights, which can't be asked.

    Attributes:
        parts: of the data, by name, that it has outputs of to be scored.
    """

    parts: Mapping[str, Tensor] = MappingProxyType({})
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
        absent: those of the tokens that the teacher lacks, of which its logits are -inf.
    """

    def __init__(self, vocab_size: int, teacher: str, absent: Sequence[int] = ()) -> None:
        super().__init__()
        self.vocab_size, self.teacher, self.absent = vocab_size, teacher, list(absent)

    def zeros(self, tokens: Tensor) -> Tensor:
        """(B, T, V) zeros in the place of logits of tokens (B, T), for checks of shapes."""
        zeros = torch.zeros(*tokens.shape, self.vocab_size, device=tokens.device)
        zeros[..., self.absent] = -torch.inf
        return zeros

    def forward(self, tokens: Tensor) -> Tensor:
        raise BadInput("teacher", type(self).__name__, "a net with weights; of this one a run had stored outputs alone")


class TeacherInFile(TeacherWithoutWeights):
    """A teacher whose outputs for a data set's samples are in a file, found by a sample's place: see `output_file`."""

    width: int  # values of an output

    def rows(self, part: str, index: Tensor, layers: Collection[str] = ()) -> Outputs:
        """Return the outputs (b, ..., C) of a part's samples at these places (b,), and as features of these layers."""
        raise NotImplementedError

    def zeros(self, inputs: Tensor, layers: Collection[str] = ()) -> Outputs:
        """Return zeros in the place of outputs for inputs (b, ...), for checks of shapes."""
        raise NotImplementedError
