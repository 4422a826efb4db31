"""What `launcher` chooses from."""

from harness.jobs.local import Local
from harness.jobs.ray import Ray
from harness.jobs.slurm import Slurm

__all__ = ["Local", "Ray", "Slurm"]
