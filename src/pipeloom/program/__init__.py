"""The program: a model and its loss as one joint graph (ir, capture), and what a rank runs of it (subprogram)."""

from .capture import CaptureError, capture
from .ir import OpRole, Program, ProgramError
from .subprogram import GradientSlot, Input, ProgramSet, SubProgram, ValueInfo

__all__ = [
    "CaptureError",
    "GradientSlot",
    "Input",
    "OpRole",
    "Program",
    "ProgramError",
    "ProgramSet",
    "SubProgram",
    "ValueInfo",
    "capture",
]
