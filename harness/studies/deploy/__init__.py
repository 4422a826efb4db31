"""A trained net as files that others run: written, read again elsewhere, compared and timed."""

from harness.studies.deploy.latency import Latency
from harness.studies.deploy.options import Options
from harness.studies.deploy.study import Study

__all__ = ["Latency", "Options", "Study"]
