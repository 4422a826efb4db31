"""The study of attention: torch's kernels by themselves, and in a block, on this machine."""

from apprentice.measuring.attention.bench import Bench
from apprentice.measuring.attention.options import Options
from apprentice.measuring.attention.rows import Row, Rows
from apprentice.measuring.attention.study import Study

__all__ = ["Bench", "Options", "Row", "Rows", "Study"]
