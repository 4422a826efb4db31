"""What an objective declares of texts, beside what `Objective` has for samples of any kind."""

from collections.abc import Collection

from apprentice.errors import BadInput
from lit_modules.nets.outputs import Outputs
from lit_modules.objectives.base import Objective

DECLARED = "relates_tokens", "by_token", "any_tokenizer", "tails", "on_policy", "teacher_writes"


class TextObjective(Objective):
    """An objective that is also made for texts, whose logits are (b, T, V).

    Attributes:
        relates_tokens: whether a token's value depends on other tokens of its row; rows of several texts are refused.
        by_token: whether values of a token depend on the logits and the label of this token alone. Then losses of a
            language model may be computed in chunks of tokens, with outputs (n, V) and labels (n,).
        any_tokenizer: whether the teacher may have other tokens than the student (`OtherTokens`), and has to.
        tails: forms of a teacher that is stored in k tokens (`teacher_tail`) that it can learn from: `bucket` and
            `renormalize` if it compares nothing but `log_probabilities`, token by token, which may be those of k
            tokens and of all others together; `sample` if it is also linear in the teacher's probabilities.
        temperatures: at which it compares them.
        on_policy: share of batches in which the student learns from texts of up to `max_new_tokens` tokens that it
            writes itself, drawn at the `sampling_temperature`; those of `every` so many steps at once.
        teacher_writes: whether these texts are the teacher's, which are written once.
    """

    relates_tokens: bool = False
    by_token: bool = False
    any_tokenizer: bool = False
    tails: Collection[str] = ()
    temperatures: Collection[float] = ()
    on_policy: float = 0.0
    every: int = 1
    teacher_writes: bool = False
    max_new_tokens: int = 1
    sampling_temperature: float = 1.0

    def set_sampling(self, max_new_tokens: int, sampling_temperature: float) -> None:
        """Set how texts are written; raise BadInput for numbers that can't be used."""
        if max_new_tokens < 1:
            raise BadInput("max_new_tokens", max_new_tokens, "at least 1")
        if not 0 <= sampling_temperature < float("inf"):
            raise BadInput("sampling_temperature", sampling_temperature, "0 or more")
        self.max_new_tokens, self.sampling_temperature = max_new_tokens, sampling_temperature

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        """Raise BadInput if texts are to be written, and outputs are not those of texts."""
        if student.logits.dim() < 3:
            self.refuse_writing()

    def refuse_writing(self) -> None:
        """Raise BadInput if the objective has texts written."""
        if self.teacher_writes:
            raise BadInput("", type(self).__name__, "another method for inputs that are no texts")
        if self.on_policy:
            raise BadInput("on_policy", self.on_policy, "0 for inputs that are no texts")


def of_texts(objective: Objective) -> TextObjective | type[TextObjective]:
    """Return what has the attributes of `TextObjective`: their defaults for another objective.

    Raises:
        BadInput: another objective declares one of them, which would say nothing.
    """
    if isinstance(objective, TextObjective):
        return objective
    if declared := [name for name in DECLARED if hasattr(objective, name)]:
        raise BadInput("", type(objective).__name__, f"a TextObjective, as it has {declared[0]}")
    return TextObjective
