"""The study of communication: what messages and collectives take, over several backends."""

from harness.studies.comm.bench import Backend, Bench
from harness.studies.comm.options import Options
from harness.studies.comm.rows import Row, Rows
from harness.studies.comm.study import Study

__all__ = ["Backend", "Bench", "Options", "Row", "Rows", "Study"]
