"""Schedules: who computes what, in which order. Pure Python, without torch.

    build("1F1B", stages=4, micro_batches=8)  ->  Schedule, whose jobs[stage] is [F0.0, F0.1, …]

Read jobs.py for the words, generator.py for the one generator, catalogue.py for the names, and draw.py to see
one.
"""

from .catalogue import build, canonical_name, forward_only, names
from .draw import draw
from .jobs import Edge, Job, Phase, Placement, Transfer, chain_edges
from .schedule import Schedule, linear, loop, vee
from .timeline import Flow, Span, StepFigures, Timeline

__all__ = [
    "Edge",
    "Flow",
    "Job",
    "Phase",
    "Placement",
    "Schedule",
    "Span",
    "StepFigures",
    "Timeline",
    "Transfer",
    "build",
    "canonical_name",
    "chain_edges",
    "draw",
    "forward_only",
    "linear",
    "loop",
    "names",
    "vee",
]
