"""The study of communication: what messages and collectives take, over several backends."""

from apprentice.measuring.comm.bench import Backend, Bench
from apprentice.measuring.comm.options import Options
from apprentice.measuring.comm.rows import Row, Rows
from apprentice.measuring.comm.study import Study

__all__ = ["Backend", "Bench", "Options", "Row", "Rows", "Study"]
