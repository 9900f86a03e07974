"""Options: the Strategy of a pipeline (strategy.py), and the checks that it makes (checks.py, own.py, values.py)."""

from .strategy import Strategy
from .values import ALL, AUTO, FILE, NONE, StrategyError

__all__ = ["ALL", "AUTO", "FILE", "NONE", "Strategy", "StrategyError"]
