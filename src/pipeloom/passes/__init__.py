"""Passes: rewrites of a Program between capture and running. Importing this package registers the built-in ones.

random_keys → batch_means → drop_clones → split_fused_grads → gradient_merge → label_chunks → recompute →
(the user's own) → split_programs
"""

from .base import Pass, apply_passes, build_pass, register_pass, registered_passes
from .batch_means import BatchMeans
from .drop_clones import DropClones
from .gradient_merge import GradientMerge
from .label_chunks import LabelChunks
from .random_keys import RandomKeys
from .recompute import Recompute
from .split_fused_grads import SplitFusedGrads
from .split_programs import split_programs

__all__ = [
    "BatchMeans",
    "DropClones",
    "GradientMerge",
    "LabelChunks",
    "Pass",
    "RandomKeys",
    "Recompute",
    "SplitFusedGrads",
    "apply_passes",
    "build_pass",
    "register_pass",
    "registered_passes",
    "split_programs",
]
