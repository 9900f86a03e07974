"""pipeloom.plan: a table of plans (table.py), by costs of a source (source.py), asked for in propose.py."""

from .found import Proposals
from .propose import plan

__all__ = ["Proposals", "plan"]
