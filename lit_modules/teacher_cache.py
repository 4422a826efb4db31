"""The teacher's outputs, computed once where its inputs repeat."""

from collections.abc import Callable, Iterable

from torch import Tensor

from apprentice import replicas
from apprentice.batch import Batch
from lit_modules.nets import Outputs


class TeacherCache:
    """Outputs of a frozen teacher for each training sample, found by the sample's index.

    Chunks of a fixed size and order are dealt to the ranks and then put together, so that a run resumed anywhere fills
    it with the same bits.

    Args:
        outputs: logits (n, classes) and features (n, ...).
    """

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs

    @classmethod
    def fill(
        cls, chunks: Iterable[Batch], samples: int, teacher: Callable[[Tensor], Outputs], max_bytes: int
    ) -> "TeacherCache | None":
        """Run the teacher over all chunks; None if `samples` outputs would take more than `max_bytes` on each rank."""
        store: dict[str, Tensor] | None = None
        for chunk in chunks:
            logits, features = teacher(chunk.inputs)
            found = {"": logits, **features}
            if store is None:
                row_bytes = sum(x[:1].numel() * x.element_size() for x in _rows(found))
                if row_bytes * samples > max_bytes:
                    return None
                store = {k: x.new_zeros(samples, *x.shape[1:]) for k, x in found.items()}
            for key, x in found.items():
                store[key][chunk.index] = x
        assert store is not None
        store = {k: replicas.all_reduce_sum_(x) for k, x in store.items()}
        return cls(Outputs(store.pop(""), store))

    def __getitem__(self, index: Tensor) -> Outputs:
        """The outputs of the samples (b,)."""
        logits, features = self.outputs
        return Outputs(logits[index], {k: x[index] for k, x in features.items()})


def _rows(found: dict[str, Tensor]) -> list[Tensor]:
    # A rank's first chunk may be empty, but its shape is there.
    return [x.new_empty(1, *x.shape[1:]) for x in found.values()]
