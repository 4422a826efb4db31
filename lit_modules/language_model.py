"""Training of a language model on next-token prediction."""

from torch import nn

from lit_modules.classifier import LitClassifier
from lit_modules.tasks import Tokens
from lit_modules.tasks.scores import ByPart
from lit_modules.text.gpt2_optimization import GPT2Optimization, learning_rate


class LitLanguageModel(LitClassifier):
    """Trains a net, tokens (B, T) -> logits (B, T, V), as GPT-2 was; same results on any number of devices.

    AdamW with weight decay for matrices only; linear warm-up for `warmup_steps`, then cosine decay to a tenth at the
    Trainer's last step; gradients clipped by norm. Batches are `apprentice.batch.Batch` with labels (b, T), or plain
    (tokens, labels) pairs.

    Args:
        net: the net.
        lr: the highest learning rate.
        warmup_steps: steps in which it rises.
        weight_decay: of parameters with two dimensions or more.
        betas: AdamW's.
        clip_norm: maximum norm of gradients, unless the Trainer has a `gradient_clip_val`; 0 for no clipping.
        tokens_per_character: for bits per character, as in `Tokens`; 1 if tokens are characters.
        compiled: compile the net with torch.compile, in each rank at the start of a fit.
        seed: key of the dropout's noise.
    """

    optimization: GPT2Optimization
    lr = learning_rate

    def __init__(
        self,
        net: nn.Module,
        lr: float = 3e-3,
        warmup_steps: int = 100,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.99),
        clip_norm: float = 1.0,
        tokens_per_character: ByPart = 1.0,
        compiled: bool = False,
        seed: int = 0,
    ) -> None:
        optimization = GPT2Optimization(lr, warmup_steps, weight_decay, betas, clip_norm, compiled)
        super().__init__(net, seed=seed, task=Tokens(tokens_per_character), optimization=optimization)
        optimization.check_loop(self)
