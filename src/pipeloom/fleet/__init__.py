"""Task nodes with credits: the second runtime, and a public one.

A graph of tasks is run by messages, with no fixed order: a task runs a scope (a micro-batch) when its inputs are ready
and its outputs have room. So 1F1B comes out of buffer sizes alone, a slow stage delays only what depends on it, and
loops run whose micro-batches stop at different lengths. The semantics follow Paddle's fleet executor (2.6).

    a = TaskNode(rank=0, task_id=0, max_run_times=4, program=lambda scope: {"x": torch.ones(3) * scope.index})
    b = TaskNode(rank=1, task_id=1, max_run_times=4, program=lambda scope: print(scope["x"]))
    connect(a, b, buffer_size=2, carries=("x",))
    run(Graph([a, b]))                        # on each of two ranks; run_here(…): both in this process

    messages.py      what tasks say, and how it looks on the wire            Message, Kind
    scope.py         the values of a micro-batch on a rank                   Scope
    task_node.py     a task and its edges                                    TaskNode, connect
    graph.py         all tasks, checked                                      Graph
    interceptor.py   the state machines: Source, Sink, Compute, Amplifier
    loops.py         and those of loops: Start, Cond
    post.py          frames and tensors between ranks
    bus.py           what a rank hears, in memory and over Gloo              connect_bus
    carrier.py       one rank's event loop                                   Carrier
    run.py           graphs of one's own                                     run, run_here
    training.py      the graphs of 1F1B, F-then-B and ZB-H1
    executor.py      a training step on them: Strategy(executor="fleet")
"""

from .bus import Bus, connect_bus
from .carrier import Carrier, Event, TaskError
from .graph import Graph, GraphError
from .messages import Kind, Message
from .run import run, run_here
from .scope import Scope
from .task_node import INFINITE, Dependency, NodeType, TaskNode, connect

__all__ = [
    "INFINITE",
    "Bus",
    "Carrier",
    "Dependency",
    "Event",
    "Graph",
    "GraphError",
    "Kind",
    "Message",
    "NodeType",
    "Scope",
    "TaskError",
    "TaskNode",
    "connect",
    "connect_bus",
    "run",
    "run_here",
]
