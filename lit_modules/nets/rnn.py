"""A recurrent classifier of text: embedding, GRU, head (Cho et al. 2014)."""

import torch
from torch import Tensor, nn

from apprentice.keyed import Dropout
from lit_modules.nets.base import Net, check_sizes, check_text_shape, check_tokens


class RNNClassifier(Net):
    """Tokens (B, T) to logits (B, classes), from the GRU's state after the last token that is not 0.

    Zeros after that token are padding; a 0 before it is an ordinary token.

    Source: the model that PyTorch's "Getting Started with Distributed RPC Framework" splits over processes; here its
    parts are pipeline stages.

    Args:
        embedding_dim: width of a token's embedding.
        hidden: width of the GRU's state.
        dropout: probability of a zero in the head's input.
        vocab_size: number of tokens; 256 for bytes.
        input_shape: (T,) of texts, any T.
    """

    feature_layer = "gru"
    stages = ("gru",)
    pooled_layer = "head<"

    def __init__(
        self,
        embedding_dim: int = 32,
        hidden: int = 128,
        dropout: float = 0.0,
        vocab_size: int = 256,
        input_shape: tuple[int, ...] = (64,),
        num_classes: int = 10,
    ) -> None:
        super().__init__()
        check_text_shape(input_shape)
        check_sizes(embedding_dim=embedding_dim, hidden=hidden)
        self.embedding = _Embedding(vocab_size, embedding_dim)
        self.gru = _LastState(embedding_dim, hidden)
        self.head = nn.Sequential(Dropout(dropout), nn.Linear(hidden, num_classes))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, classes) of tokens (B, T), integers of any type."""
        check_tokens(tokens)
        logits: Tensor = self.head(self.gru(*self.embedding(tokens)))
        return logits

    def pipeline_stages(self) -> list[nn.Module]:
        """Embedding, GRU and head; the embedding's output is a tuple."""
        return [self.embedding, self.gru, self.head]


class _Embedding(nn.Module):
    def __init__(self, vocab_size: int, embedding_dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, embedding_dim)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T) -> (B, T, D), and the lengths (B,) of the texts."""
        ends = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        return self.table(tokens.long()), ((tokens != 0) * ends).amax(1)


class _LastState(nn.Module):
    def __init__(self, embedding_dim: int, hidden: int) -> None:
        super().__init__()
        self.cells = nn.GRU(embedding_dim, hidden, batch_first=True)

    def forward(self, embedded: Tensor, lengths: Tensor) -> Tensor:
        """(B, T, D) and (B,) -> (B, H), the state after the last token; for an empty text, after one of padding."""
        states: Tensor  # (B, T, H)
        states, _ = self.cells(embedded)  # `len` of it would fix the batch size of an export
        return states[torch.arange(states.shape[0], device=states.device), lengths.clamp(min=1) - 1]
