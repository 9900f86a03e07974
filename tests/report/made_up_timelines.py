"""Timelines for the tests of this room: a small event simulation of 1F1B on a chain of stages."""

from __future__ import annotations

import random

from pipeloom.schedules.timeline import Flow, Span, Timeline


def one_f_one_b(
    title: str = "predicted",
    stages: int = 2,
    micro_batches: int = 4,
    forward: float = 0.010,
    backward: float = 0.020,
    latency: float = 0.001,
    jitter: float = 0.0,
    unit: str = "s",
    seed: int = 0,
    activation: int = 4_000_000,
) -> Timeline:
    """One 1F1B step with finalize and update; `jitter` stretches each job by up to that share of its cost."""
    noise = random.Random(seed)
    orders: list[list[tuple[str, int]]] = []
    for stage in range(stages):
        warm = min(stages - stage, micro_batches)
        order = [("F", m) for m in range(warm)]
        for m in range(micro_batches):
            order.append(("X", m))
            if warm + m < micro_batches:
                order.append(("F", warm + m))
        orders.append(order)
    ends: dict[tuple[str, int, int], float] = {}
    clock, at = [0.0] * stages, [0] * stages
    spans: list[Span] = []
    flows: list[Flow] = []
    live = [0.0] * stages
    memory: list[list[tuple[float, float]]] = [[(0.0, 0.0)] for _ in range(stages)]
    while any(at[s] < len(orders[s]) for s in range(stages)):
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                kind, m = orders[stage][at[stage]]
                source = stage - 1 if kind == "F" else stage + 1
                ready = 0.0
                if 0 <= source < stages:
                    if (kind, source, m) not in ends:
                        break
                    sent = ends[kind, source, m]
                    ready = sent + latency
                    direction = "F" if kind == "F" else "B"
                    flows.append(Flow(direction, source, stage, m, source, stage, sent, ready, 1_000_000))
                if ready > clock[stage]:
                    spans.append(Span(stage, "wait", -1, -1, clock[stage], ready))
                start = max(ready, clock[stage])
                cost = (forward if kind == "F" else backward) * (1 + jitter * noise.random())
                end = clock[stage] = ends[kind, stage, m] = start + cost
                spans.append(Span(stage, kind, stage, m, start, end))
                live[stage] += activation if kind == "F" else -activation
                memory[stage].append((start if kind == "F" else end, live[stage]))
                at[stage] += 1
    finished = max(clock)
    for stage in range(stages):
        middle = clock[stage] + forward / 4
        spans.append(Span(stage, "finalize", -1, -1, clock[stage], middle))
        spans.append(
            Span(stage, "update", -1, -1, max(middle, finished), max(middle, finished) + forward / 2)
        )
    return Timeline(title, stages, spans, flows, memory, unit)
