"""The fleet graph of generation: five tasks a rank, and the loop that each token goes round.

    rank s        start ──▶ cond ──▶ send ──▶ recv ──LOOP──▶ cond          cond ──STOP_LOOP──▶ end
    between       send of stage s ──▶ send of stage s + 1                  recv of the last ──▶ recv of all others

Task ids are rank·5 + {start 0, cond 1, send 2, recv 3, end 4}, as in Paddle's fleet executor. `send` is a stage's
layers for one token, or for the prompt; `recv` takes the token that the last stage has chosen. How many scopes are in
flight is bounded by the buffer between start and cond alone: so every other edge is infinite, and a token costs two
messages between two stages: the hidden state there, the token back.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Final

from ..fleet.graph import Graph
from ..fleet.task_node import INFINITE, Dependency, NodeType, Program, TaskNode, connect

#: the tasks of a rank, in the order of their ids
TASKS: Final = ("start", "cond", "send", "recv", "end")
#: tasks that take microseconds go before a stage's layers
_PRIORITY: Final = {"start": 1, "cond": 2, "send": 0, "recv": 3, "end": 4}
#: what goes from stage to stage, and what the last stage tells all others
PASSED: Final = ("passed", "cancelled")
CHOSEN: Final = ("tokens", "stopped")
#: the variable by which a scope goes round again
GOES_ON: Final = "goes_on"


def stream_graph(
    stages: int,
    scopes: int,
    in_flight: int,
    *,
    continuous: bool,
    rank: int,
    programs: Mapping[str, Program],
) -> Graph:
    """The graph of a run over `scopes` scopes.

    in_flight: scopes in the loop at once; the size of a batch where the refill isn't continuous (the last batch may
    be short). programs: what this rank's tasks do, by name (start, send, recv, end).
    """
    tasks: list[dict[str, TaskNode]] = []
    for r in range(stages):
        own: dict[str, TaskNode] = {}
        for number, name in enumerate(TASKS):
            own[name] = TaskNode(
                r,
                r * len(TASKS) + number,
                scopes,
                programs.get(name) if r == rank else None,
                {"start": NodeType.START, "cond": NodeType.COND}.get(name, NodeType.COMPUTE),
                name,
                cond_var_name=GOES_ON if name == "cond" else None,
                continuous=continuous and name == "start",
                priority=_PRIORITY[name],
            )
        connect(own["start"], own["cond"], buffer_size=in_flight)
        connect(own["cond"], own["send"], buffer_size=INFINITE)
        connect(own["send"], own["recv"], buffer_size=INFINITE)
        connect(own["recv"], own["cond"], buffer_size=INFINITE, dependency=Dependency.LOOP)
        connect(own["cond"], own["end"], buffer_size=INFINITE, dependency=Dependency.STOP_LOOP)
        tasks.append(own)
    last = tasks[-1]["recv"]
    for above, below in pairwise(tasks):
        connect(above["send"], below["send"], buffer_size=INFINITE, carries=PASSED, keep=False)
        connect(last, above["recv"], buffer_size=INFINITE, carries=CHOSEN)
    return Graph(task for own in tasks for task in own.values())
