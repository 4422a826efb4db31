"""The exact mode: the same float32 bits on any number of devices."""

from strategies.exact.steps import ExactSteps
