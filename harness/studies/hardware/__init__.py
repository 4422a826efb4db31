"""What a strategy costs and gains: figures of real fits, taken inside their ranks."""

from harness.studies.hardware.bench import Bench
from harness.studies.hardware.log import Log
from harness.studies.hardware.rows import Row, Rows

__all__ = ["Bench", "Log", "Row", "Rows"]
