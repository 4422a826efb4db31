"""Objectives: one distillation method a file. A new one is a file here and a line below."""

from lit_modules.objectives.base import FeatureObjective, Objective, Term
from lit_modules.objectives.cosine import Cosine
from lit_modules.objectives.cross_entropy import CrossEntropy
from lit_modules.objectives.hint import Hint
from lit_modules.objectives.hinton import Hinton
from lit_modules.objectives.sum import Sum

__all__ = ["Cosine", "CrossEntropy", "FeatureObjective", "Hint", "Hinton", "Objective", "Sum", "Term"]
