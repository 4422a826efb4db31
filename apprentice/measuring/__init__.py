"""What a strategy costs and gains: figures of real fits, taken inside their ranks."""

from apprentice.measuring.bench import Bench
from apprentice.measuring.log import Log
from apprentice.measuring.rows import Row, Rows

__all__ = ["Bench", "Log", "Row", "Rows"]
