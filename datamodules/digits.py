"""scikit-learn's handwritten digits, which need no download."""

import torch

from datamodules.images import ImageData
from datamodules.splits import Split, balanced_subset, complement


class Digits(ImageData):
    """1,797 real handwritten digits, 8 x 8, with grey levels from 0 to 16 (Alpaydin and Kaynak, UCI, 1998).

    1,437 train and 360 test, 36 of each class; this split is fixed and depends on no seed.
    """

    input_shape = (1, 8, 8)
    class_names = tuple("0123456789")
    mean, std = (0.3049,), (0.3759,)  # of the 1,437
    levels = 16
    free_options = ImageData.free_options | {"root"}

    def read(self) -> tuple[Split, Split]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        whole = Split(torch.from_numpy(digits.images).byte()[:, None], torch.from_numpy(digits.target).long())
        test = balanced_subset(whole.labels, 360, key=0)
        return whole.take(complement(test, len(whole.labels))), whole.take(test)
