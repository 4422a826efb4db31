"""The study of pipeline parallelism: one net on one device, split, and pipelined in every way."""

from harness.studies.pipeline.bench import Bench
from harness.studies.pipeline.options import Options
from harness.studies.pipeline.rows import Cut, Row, Rows
from harness.studies.pipeline.study import Study
from harness.studies.pipeline.task import Noise, Task

__all__ = ["Bench", "Cut", "Noise", "Options", "Row", "Rows", "Study", "Task"]
