"""The study of pipeline parallelism: one net on one device, split, and pipelined in every way."""

from apprentice.measuring.pipeline.bench import Bench
from apprentice.measuring.pipeline.options import Options
from apprentice.measuring.pipeline.rows import Cut, Row, Rows
from apprentice.measuring.pipeline.study import Study
from apprentice.measuring.pipeline.task import Noise, Task

__all__ = ["Bench", "Cut", "Noise", "Options", "Row", "Rows", "Study", "Task"]
