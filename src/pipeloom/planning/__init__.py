"""Planning: what a schedule costs, how it is run safely, and the plan that says both. Pure Python, without
torch.

costs -> lower (place transfers) -> verify (prove them safe) -> simulate (predict) -> Plan
"""

from .bounds import lower_bound
from .costs import Costs, roofline
from .errors import PlanError
from .lower import Lowered, lower
from .plan import Plan
from .simulate import Simulation, simulate, simulation_json
from .verify import ascending, verify

__all__ = [
    "Costs",
    "Lowered",
    "Plan",
    "PlanError",
    "Simulation",
    "ascending",
    "lower",
    "lower_bound",
    "roofline",
    "simulate",
    "simulation_json",
    "verify",
]
