"""A trained net as files that others run: written, read again elsewhere, compared and timed."""

from apprentice.deploying.latency import Latency
from apprentice.deploying.options import Options
from apprentice.deploying.study import Study

__all__ = ["Latency", "Options", "Study"]
