"""Pipeline parallelism: a module cut into stages, and how the micro-batches of a batch get through them."""

from strategies.pipeline.strategy import PipelineStrategy, Schedule
