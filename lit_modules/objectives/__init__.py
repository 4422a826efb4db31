"""Objectives: one distillation method a file.

A new method is a file here and two lines below: for type checkers, and in the table of what is imported when used.
"""

from typing import TYPE_CHECKING

from apprentice.faces import import_when_used

if TYPE_CHECKING:
    from lit_modules.objectives.adaptive_kl import AdaptiveKL
    from lit_modules.objectives.attention_transfer import AttentionTransfer
    from lit_modules.objectives.attn_distill import AttnDistill
    from lit_modules.objectives.base import FeatureObjective, Objective, Term
    from lit_modules.objectives.bounded_regression import BoundedRegression
    from lit_modules.objectives.candidate_scores import MarginMSE, ScoreKL
    from lit_modules.objectives.cc import CC
    from lit_modules.objectives.cosine import Cosine
    from lit_modules.objectives.crd import CRD
    from lit_modules.objectives.cross_entropy import CrossEntropy
    from lit_modules.objectives.ctkd import CTKD
    from lit_modules.objectives.deit_token import DeiTToken
    from lit_modules.objectives.dist import DIST
    from lit_modules.objectives.dkd import DKD
    from lit_modules.objectives.dml import DML
    from lit_modules.objectives.embedding_match import EmbeddingMatch
    from lit_modules.objectives.embeddings import EmbeddingObjective
    from lit_modules.objectives.fitnet import FitNet
    from lit_modules.objectives.gkd import GKD
    from lit_modules.objectives.hidden_states import HiddenStates
    from lit_modules.objectives.hint import Hint
    from lit_modules.objectives.hinton import Hinton
    from lit_modules.objectives.jensen_shannon import JensenShannon
    from lit_modules.objectives.linearize import Linearize
    from lit_modules.objectives.logit_mse import LogitMSE
    from lit_modules.objectives.logits import LogitObjective
    from lit_modules.objectives.mld import MLD
    from lit_modules.objectives.nkd import NKD
    from lit_modules.objectives.nst import NST
    from lit_modules.objectives.pkt import PKT
    from lit_modules.objectives.relations import AttentionScores, MiniLM
    from lit_modules.objectives.reverse_kl import ReverseKL
    from lit_modules.objectives.review_kd import ReviewKD
    from lit_modules.objectives.rkd import RKD
    from lit_modules.objectives.rld import RLD
    from lit_modules.objectives.sequence_level import SequenceLevel
    from lit_modules.objectives.similarity_kl import SimilarityKL
    from lit_modules.objectives.simkd import SimKD
    from lit_modules.objectives.skew_kl import SkewKL
    from lit_modules.objectives.sp import SP
    from lit_modules.objectives.stages import StagesObjective
    from lit_modules.objectives.sum import Sum
    from lit_modules.objectives.text_objective import TextObjective
    from lit_modules.objectives.tf_kd import TfKD
    from lit_modules.objectives.token_match import TokenMatch, TokenSimilarity
    from lit_modules.objectives.total_variation import TotalVariation
    from lit_modules.objectives.ttm import TTM
    from lit_modules.objectives.uld import ULD
    from lit_modules.objectives.untrained import Untrained
    from lit_modules.objectives.vid import VID

MODULES = {
    "AdaptiveKL": "adaptive_kl",
    "AttentionTransfer": "attention_transfer",
    "AttnDistill": "attn_distill",
    "FeatureObjective": "base",
    "Objective": "base",
    "Term": "base",
    "BoundedRegression": "bounded_regression",
    "MarginMSE": "candidate_scores",
    "ScoreKL": "candidate_scores",
    "CC": "cc",
    "Cosine": "cosine",
    "CRD": "crd",
    "CrossEntropy": "cross_entropy",
    "CTKD": "ctkd",
    "DeiTToken": "deit_token",
    "DIST": "dist",
    "DKD": "dkd",
    "DML": "dml",
    "EmbeddingMatch": "embedding_match",
    "EmbeddingObjective": "embeddings",
    "FitNet": "fitnet",
    "GKD": "gkd",
    "HiddenStates": "hidden_states",
    "Hint": "hint",
    "Hinton": "hinton",
    "JensenShannon": "jensen_shannon",
    "Linearize": "linearize",
    "LogitMSE": "logit_mse",
    "LogitObjective": "logits",
    "MLD": "mld",
    "NKD": "nkd",
    "NST": "nst",
    "PKT": "pkt",
    "AttentionScores": "relations",
    "MiniLM": "relations",
    "ReverseKL": "reverse_kl",
    "ReviewKD": "review_kd",
    "RKD": "rkd",
    "RLD": "rld",
    "SequenceLevel": "sequence_level",
    "SimilarityKL": "similarity_kl",
    "SimKD": "simkd",
    "SkewKL": "skew_kl",
    "SP": "sp",
    "StagesObjective": "stages",
    "Sum": "sum",
    "TextObjective": "text_objective",
    "TfKD": "tf_kd",
    "TokenMatch": "token_match",
    "TokenSimilarity": "token_match",
    "TotalVariation": "total_variation",
    "TTM": "ttm",
    "ULD": "uld",
    "Untrained": "untrained",
    "VID": "vid",
}

__all__ = list(MODULES)

if not TYPE_CHECKING:
    __getattr__ = import_when_used(__name__, MODULES)
