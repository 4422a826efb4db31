"""Fits of a run as jobs of an engine: processes on this machine, SLURM through submitit, or Ray.

`harness.studies.launcher` is the door. Loads nothing: machines that run a job import `command` alone, without torch.
"""
