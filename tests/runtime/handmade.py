"""Small sub-programs written by hand, so that the runtime is tested without capture and passes.

The model: h[0] = x, h[c+1] = tanh(h[c] @ w[c]), one matrix a chunk; loss = mean((h[C] (+ h[1]) − y)²).
Options: `skip` adds chunk 0's output in the last chunk (an edge over all chunks between); `tied` makes the
last chunk use w[0] under another name; `frozen` gives chunk 0 no gradient; `weighted` makes the loss (sum of
squares of the rows that count, number of such rows); `counted` gives chunk 1 a buffer that scales its input
and grows at each F.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeloom.program.subprogram import GradientSlot, Input, ProgramSet, SubProgram, ValueInfo
from pipeloom.runtime.executor import Executor
from pipeloom.runtime.parameters import ParameterStore
from pipeloom.runtime.stepping import drive
from pipeloom.runtime.transport import MemoryTransport
from pipeloom.runtime.update import Updater
from pipeloom.schedules.jobs import Job, LoweredJob, Phase, Transfer


class Chain(nn.Module):
    """The plain model, and its loss."""

    def __init__(self, chunks, width=4, skip=False, tied=False, frozen=False, weighted=False, counted=False):
        super().__init__()
        torch.manual_seed(0)
        self.chunks, self.width = chunks, width
        self.skip, self.tied, self.frozen, self.weighted, self.counted = skip, tied, frozen, weighted, counted
        for c in range(chunks):
            self.register_parameter(f"w{c}", nn.Parameter(torch.randn(width, width, dtype=torch.float64)))
        if tied:
            self.register_parameter(f"w{chunks - 1}", self.w0)
        if frozen:
            self.w0.requires_grad_(False)
        if counted:
            self.register_buffer("count", torch.ones((), dtype=torch.float64))

    def forward(self, x, y):
        h = x
        first = None
        for c in range(self.chunks):
            if self.counted and c == 1:
                h = h * self.count
                self.count = self.count + 1
            h = torch.tanh(h @ getattr(self, f"w{c}"))
            first = h if first is None else first
        if self.skip:
            h = h + first
        square = (h - y) ** 2
        if self.weighted:
            return (square.sum(1) * (y[:, 0] > 0)).sum(), (y[:, 0] > 0).sum()
        return square.mean()


def programs(model: Chain, rows: int) -> ProgramSet:
    """The ProgramSet of a Chain for micro-batches of `rows` samples."""
    return _Author(model, rows).write()


@dataclass
class _Author:
    model: Chain
    rows: int

    def write(self) -> ProgramSet:
        m, last = self.model, self.model.chunks - 1
        self.values: dict[str, ValueInfo] = {}
        all_programs = {}
        for c in range(m.chunks):
            for program in self.chunk(c, last):
                all_programs[program.kind, c] = program
        messages = {}
        for c in range(last):
            messages["F", c, c + 1] = [f"h{c + 1}"]
            if not (m.frozen and c == 0):
                messages["B", c + 1, c] = [f"g{c + 1}"]
        if m.skip and last > 1:
            messages["F", 0, last] = ["h1"]
            messages["B", last, 0] = ["gs"]
        elif m.skip and last == 1:
            messages["B", 1, 0] = ["g1", "gs"]
        slots = [
            GradientSlot(f"s{c}", f"w{c}", int(m.tied and c == last), (m.width, m.width), torch.float64, c)
            for c in range(m.chunks)
            if not (m.frozen and c == 0)
        ]
        weight = {"weight": "weight", "weight_chunk": last} if m.weighted else {}
        return ProgramSet(m.chunks, all_programs, self.values, messages, slots, "loss", last, **weight)

    def value(self, name, shape=None, dtype=torch.float64):
        shape = (self.rows, self.model.width) if shape is None else shape
        example = torch.empty(shape, dtype=dtype)
        number = len(self.values)
        self.values[name] = ValueInfo(
            name, shape, example.stride(), dtype, number, example.nbytes, example.nbytes
        )
        return name

    def chunk(self, c, last):
        m = self.model
        end, counted, skip = c == last, m.counted and c == 1, m.skip and c == last
        source = Input("input", "0") if c == 0 else Input("value", f"h{c}")
        inputs = [source, Input("param", f"w{c}")]
        inputs += [Input("buffer", "count")] if counted else []
        inputs += [Input("input", "1")] if end else []
        inputs += [Input("value", "h1")] if skip and c != 1 else []
        outputs = [self.value(f"h{c + 1}")]
        outputs += [self.value("count_next", ())] if counted else []
        if end:
            outputs += [self.value("diff"), self.value("loss", ())]
            outputs += [self.value("weight", (), torch.int64)] if m.weighted else []

        def forward(args):
            args, rest = list(args), iter(args[2:])
            args_h, w = args[0], args[1]
            count = next(rest) if counted else None
            out = torch.tanh((args_h if count is None else args_h * count) @ w)
            result = [out]
            if counted:
                result.append(count + 1)
            if end:
                y = next(rest)
                total = out
                if skip:
                    total = out + (args_h if c == 1 else next(rest))
                diff = total - y
                square = diff**2
                mask = y[:, 0] > 0
                result.append(diff * mask[:, None] if m.weighted else diff)
                result.append((square.sum(1) * mask).sum() if m.weighted else square.mean())
                result += [mask.sum()] if m.weighted else []
            return tuple(result)

        yield self.program("F", c, forward, inputs, outputs, {"count": "count_next"} if counted else {})
        yield from self.backward(c, end, counted, source)

    def program(self, kind, c, call, inputs, outputs, buffers=None):
        def boxed(args):
            given = list(args)
            args.clear()
            return call(given)

        return SubProgram(kind, c, boxed, inputs, outputs, buffers or {}, peak_bytes=64, graph="by hand")

    def backward(self, c, end, counted, source):
        m, last = self.model, self.model.chunks - 1
        if m.frozen and c == 0:
            for kind in ("B", "W", "X"):
                yield SubProgram(kind, c, lambda _: (), [], [])
            return
        gives = c > 0 and not (m.frozen and c == 1)
        joins = m.skip and c == 0
        head = [Input("value", f"h{c + 1}"), Input("param", f"w{c}")]
        head += [Input("buffer", "count")] if counted else []
        head += [Input("value", "diff"), Input("tangent", "")] if end else [Input("value", f"g{c + 1}")]
        head += [Input("value", "gs")] if joins else []

        def local(args):
            rest = iter(args)
            h, w = next(rest), next(rest)
            count = next(rest) if counted else None
            if end:
                diff, tangent = next(rest), next(rest)
                whole = 2 * diff * tangent / (1 if m.weighted else diff.numel())
                g = whole
            else:
                whole = None
                g = next(rest)
            if joins:
                g = g + next(rest)
            a = g * (1 - h**2)
            back = a @ w.t() if count is None else (a @ w.t()) * count
            return a, back, whole, count

        outs = [self.value(f"g{c}")] if gives else []
        outs += [self.value("gs")] if m.skip and end and last > 0 else []

        def results(args):
            a, back, whole, count = local(args)
            given = ([back] if gives else []) + ([whole] if m.skip and end and last > 0 else [])
            return a, given, count

        def add(acc, a, h, count):
            acc.addmm_((h if count is None else h * count).t(), a)

        whole_inputs = [*head, source, Input("acc", f"s{c}")]

        def backward(args):
            *first, h, acc = args
            a, given, count = results(first)
            add(acc, a, h, count)
            return tuple(given)

        yield self.program("X", c, backward, whole_inputs, outs)
        if not outs:
            yield SubProgram("B", c, lambda _: (), [], [])
            yield self.program("W", c, backward, whole_inputs, [])
            return

        def backward_b(args):
            a, given, _ = results(args)
            return (*given, a)

        def backward_w(args):
            if counted:
                a, h, acc, count = args
                add(acc, a, h, count)
            else:
                a, h, acc = args
                add(acc, a, h, None)
            return ()

        yield self.program("B", c, backward_b, head, [*outs, self.value(f"a{c}")])
        inputs = [Input("value", f"a{c}"), source, Input("acc", f"s{c}")]
        yield self.program("W", c, backward_w, inputs + ([Input("buffer", "count")] if counted else []), [])


def lowered(placement, program_sets, split=False, train=True) -> list[list[LoweredJob]]:
    """All forwards, then all backwards, stage by stage, with transfers placed without any cunning: receives
    are posted and awaited right before their consumer."""
    stages, chunks = max(placement) + 1, len(placement)
    edges = sorted({edge for s in program_sets for edge in s.messages})
    lists: list[list[LoweredJob]] = [[] for _ in range(stages)]

    def place(kind, c, m):
        way = "F" if kind == "F" else "B"
        here = placement[c]
        if kind != "W":
            sources = [s for d, s, t in edges if d == way and t == c and placement[s] != here]
            lists[here] += [
                Transfer(a, way, s, c, m, placement[s]) for a in ("post", "recv") for s in sources
            ]
        lists[here].append(Job(kind, c, m))
        if kind != "W":
            for d, s, t in edges:
                if d == way and s == c and placement[t] != here:
                    lists[here].append(Transfer("send", d, s, t, m, placement[t]))

    count = len(program_sets)
    for m in range(count):
        for c in range(chunks):
            place("F", c, m)
    if train:
        for m in range(count):
            for c in reversed(range(chunks)):
                for kind in "BW" if split else "X":
                    place(kind, c, m)
        for jobs in lists:
            jobs += [Phase("finalize"), Phase("update")]
    return lists


def batch(rows, width=4, seed=1):
    """Micro-batches of the given numbers of rows: [[x, y], …]."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(n, width, dtype=torch.float64, generator=generator) for _ in range(2)] for n in rows]


@dataclass
class Fleet:
    """All ranks of one process."""

    models: list[Chain]
    stores: list[ParameterStore]
    executors: list[Executor]
    updaters: list[Updater]
    rows: list[int]
    weighted: bool

    def step(self, batches, update=True, **options):
        weights = None if self.weighted else [float(n) for n in self.rows]
        total = 1.0 if self.weighted else sum(weights)
        tangents = [torch.tensor(1.0 if self.weighted else n / total, dtype=torch.float64) for n in self.rows]
        keys = [torch.tensor(m) for m in range(len(batches))]
        return drive(
            [
                e.run(batches, tangents, keys, weights=weights, update=update, **options)
                for e in self.executors
            ]
        )

    def gradients(self) -> dict[str, Tensor]:
        """By first name; ranks that share a parameter must agree bit for bit."""
        found: dict[str, Tensor] = {}
        for store in self.stores:
            for gradient in store.gradients:
                if gradient.name in found:
                    assert torch.equal(found[gradient.name], gradient.view)
                found[gradient.name] = gradient.view.clone()
        return found


def fleet(
    placement,
    rows,
    split=False,
    optimizer=None,
    scaler=None,
    max_norm=None,
    average=True,
    scheduler=None,
    **options,
):
    """Executors of all stages of a Chain of len(placement) chunks in one process."""
    stages = max(placement) + 1
    transports = MemoryTransport.group(stages)
    models, stores, executors, updaters = [], [], [], []
    sets = {n: programs(Chain(len(placement), **options), n) for n in dict.fromkeys(rows)}
    program_sets = [sets[n] for n in rows]
    lists = lowered(placement, program_sets, split)
    for stage in range(stages):
        model = Chain(len(placement), **options)
        store = ParameterStore(model, program_sets[0], placement, stage)
        trainable = [p for _, p in store.trainable()]
        made = optimizer(trainable) if optimizer is not None and trainable else None
        rate = scheduler(made) if scheduler is not None and made is not None else None
        updater = Updater(store, transports[stage], made, rate, scaler and scaler(), max_norm)
        executors.append(
            Executor(
                stage,
                lists[stage],
                program_sets,
                placement,
                store,
                transports[stage],
                updater=updater,
                average=average,
            )
        )
        models.append(model)
        stores.append(store)
        updaters.append(updater)
    return Fleet(models, stores, executors, updaters, list(rows), options.get("weighted", False))


def eager(placement, batches, **options):
    """(loss, {name: gradient}, model) by autograd, micro-batch by micro-batch."""
    model = Chain(len(placement), **options)
    losses, weights = [], []
    total = sum(len(x) for x, _ in batches)
    for x, y in batches:
        if model.weighted:
            loss, weight = model(x, y)
            weights.append(int(weight))
        else:
            loss = model(x, y) * len(x) / total
        loss.backward()
        losses.append(float(loss.detach()))
    if model.weighted:
        total = sum(weights)
        for p in model.parameters():
            p.grad /= total
        losses = [sum(losses) / total]
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return sum(losses), grads, model
