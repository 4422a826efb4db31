"""The teacher's outputs for each training sample, computed once if inputs repeat."""

from collections.abc import Callable, Iterable

from torch import Tensor

from apprentice import replicas
from apprentice.batch import Batch
from lit_modules.nets import Outputs


class TeacherCache:
    """Outputs of a frozen teacher by the sample's index: logits (n, classes) and features (n, ...).

    Ranks compute chunks of fixed size and order and then share them, so a resumed run gets the same bits.
    """

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs

    @classmethod
    def fill(
        cls, chunks: Iterable[Batch], samples: int, teacher: Callable[[Tensor], Outputs], max_bytes: int
    ) -> "TeacherCache | None":
        """Run the teacher over all chunks; None if `samples` outputs take more than `max_bytes` on each rank."""
        store: dict[str, Tensor] | None = None
        for chunk in chunks:
            logits, features = teacher(chunk.inputs)
            found = {"": logits, **features}
            if store is None:
                # A rank's first chunk may be empty, but has the shapes.
                row_bytes = sum(x.new_empty(1, *x.shape[1:]).nbytes for x in found.values())
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
