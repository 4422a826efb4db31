"""The study of attention: torch's kernels by themselves, and in a block, on this machine."""

from harness.studies.attention.bench import Bench
from harness.studies.attention.options import Options
from harness.studies.attention.rows import Row, Rows
from harness.studies.attention.study import Study

__all__ = ["Bench", "Options", "Row", "Rows", "Study"]
