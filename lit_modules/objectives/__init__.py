"""Objectives: one distillation method a file. A new method is a file here and a line below."""

from lit_modules.objectives.base import FeatureObjective, Objective, Term
from lit_modules.objectives.cosine import Cosine
from lit_modules.objectives.cross_entropy import CrossEntropy
from lit_modules.objectives.deit_token import DeiTToken
from lit_modules.objectives.hint import Hint
from lit_modules.objectives.hinton import Hinton
from lit_modules.objectives.jensen_shannon import JensenShannon
from lit_modules.objectives.reverse_kl import ReverseKL
from lit_modules.objectives.sum import Sum
