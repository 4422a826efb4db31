"""The options that texts add to kd.py."""

from dataclasses import dataclass
from typing import Literal

from apprentice.errors import BadInput
from harness.cli import Limit, at_least, option
from harness.runs.options import RunOptions
from lit_modules.objectives.top_k import Tail
from lit_modules.text.stored_teacher import Stored


@dataclass
class TextOptions(RunOptions):
    """Options of a distillation of language models."""

    teacher_tokenizer: str | None = option(
        None, excludes={"teacher_top_k": "which keeps probabilities of the students' tokens"}
    )
    """the teacher's tokenizer, if its tokens are not the students', as `data.tokenizer` has it; students learn from it
    by ULD."""
    teacher_top_k: int | Literal["all"] | None = option(None, needs={"teacher_cache_dir": "DIR"})
    """keep in `teacher_cache_dir` the teacher's probabilities of so many tokens in each place that is learned, or of
    all; later runs read them, and do not load the teacher."""
    teacher_tail: Tail | None = option(None, needs={"teacher_top_k": "N"})
    """what stands for other tokens: their mass as one bucket, which is the default; nothing, as the tokens are a sample
    of the distribution; or nothing, as those kept are renormalised."""
    generated_prompts: int | None = option(None, Limit(lambda count: count >= 0, "a number of answers, or 0 for none"))
    """of conversations, answers of nets to turns of the test, a token at a time the likeliest one; 0 for none; default:
    12, or 100 with `generated_metric`. Those of the first seed are in report.html."""
    generated_tokens: int | None = option(None, at_least(1, "tokens"))
    """of an answer at most; default: 64."""
    generated_metric: str | None = None
    """the import path of a function (answer, reference) of texts that gives a number, such as
    harness.studies.text.answers.exact_match; its mean is in the table."""
    loss_chunk: int | None = option(
        None, Limit(lambda size: size >= 0, "a number of tokens, or 0 for all of a batch at once")
    )
    """tokens whose logits are held at once; 0: all; default: 128 if V is 4,096 or more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generated_metric is not None and self.generated_prompts == 0:
            raise BadInput("generated_metric", self.generated_metric, "prompts: `generated_prompts 1` or more")
        if self.teacher_top_k is not None:
            Stored(self.teacher_top_k)
        if self.teacher_tail is not None and self.teacher_top_k == "all":
            raise BadInput(
                "teacher_tail", self.teacher_tail, "not allowed with `teacher_top_k all`, which leaves no tail"
            )
