"""Prompts of a test that nearly equal one that trains: MinHash (Broder 1997) of their characters, in bands.

A signature is the least of the hashes of a text's 5-grams, by each of 64 functions. The share of places at which two
signatures agree estimates the Jaccard similarity of the sets of 5-grams, with a standard deviation of at most 0.06. Of
a short text, which has few, it is the hash of the whole.
"""

import numpy as np

GRAM, HASHES, BAND = 5, 64, 4  # bytes; functions; places of a signature that have to agree at first
SHORT = 24  # bytes of a text below which it is hashed as a whole
ALIKE = 0.8  # similarity of nearly equal prompts
LONGEST = 8192  # bytes of a text that are read
CANDIDATES = 64  # that are compared for each band
_DRAWN = np.random.Generator(np.random.PCG64(0)).integers(1, 2**63, (3, HASHES), dtype=np.uint64)
FACTORS, SHIFTS, WEIGHTS = _DRAWN[0, :HASHES] | np.uint64(1), _DRAWN[1, :HASHES], _DRAWN[2, :SHORT] | np.uint64(1)


def sign(text: str) -> np.ndarray:
    """Return the signature (64,) uint32 of a text, whatever its case and spaces."""
    letters = np.frombuffer(" ".join(text.lower().split()).encode(errors="surrogatepass")[:LONGEST], np.uint8)
    width = GRAM if len(letters) >= SHORT else max(len(letters), 1)
    letters = np.pad(letters, (0, max(width - len(letters), 0)))
    with np.errstate(over="ignore"):
        grams = np.lib.stride_tricks.sliding_window_view(letters, width).astype(np.uint64) @ WEIGHTS[:width]  # (n,)
        mixed = np.unique(grams ^ (grams >> np.uint64(31)))
        hashes = mixed[:, None] * FACTORS + SHIFTS  # (n, 64)
    return (hashes >> np.uint64(32)).min(0).astype(np.uint32)


def count_near(tested: np.ndarray, trained: np.ndarray) -> int:
    """Return how many of the signatures (n, 64) are nearly equal to one of (m, 64)."""
    near = np.zeros(len(tested), bool)
    if not len(trained):
        return 0
    for start in range(0, HASHES, BAND):
        keys, others = (_keys(x[:, start : start + BAND]) for x in (trained, tested))
        order = keys.argsort(kind="stable")
        first, last = (np.searchsorted(keys[order], others, side) for side in ("left", "right"))
        for row in np.flatnonzero(~near & (first < last)):
            candidates = trained[order[first[row] : min(last[row], first[row] + CANDIDATES)]]
            near[row] = ((candidates == tested[row]).mean(1) >= ALIKE).any()
    return int(near.sum())


def _keys(band: np.ndarray) -> np.ndarray:
    """Return (n,), one number for each row (n, BAND) of uint32."""
    keys: np.ndarray = band.astype(np.uint64) @ WEIGHTS[:BAND]
    return keys
