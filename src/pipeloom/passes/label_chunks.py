"""label_chunks: every op learns which chunk it belongs to.

Forward ops are labelled by the cuts, and never below their inputs. The rest is inferred by dataflow:

    backward op       the smaller of its forward op's label (by sequence number) and its backward inputs' labels
    accumulation      the smaller of its operands' labels: the label that it inherits is stale (gradients of skips)
    getitem, view     its producer's label

Ops that each chunk recomputes for itself (see `cuts.replicated`) have no label. Followed: the op_role and
chunk_id inference of PaddlePaddle's static pipeline passes; every label is checked.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch
import torch.fx as fx

from ..program import compat
from ..program.ir import CHUNK, ROLE, OpRole, Program, ProgramError, is_getitem, where
from .anchors import CutPoints, anchored_cuts
from .base import Pass, register_pass
from .cuts import choose_cuts, forward_order, replicated


@register_pass("label_chunks")
class LabelChunks(Pass):
    """Writes node.meta["chunk_id"] on every live op. Options: chunks, cuts as in
    `Strategy.cuts`, or instead of them `positions` in the order of forward ops (what a search chose), or `like`,
    the cut points of an
    earlier capture of the same model. `points` are its own."""

    after = ("random_keys", "split_fused_grads", "gradient_merge")

    def __init__(
        self,
        chunks: int = 1,
        cuts: str | Sequence[str] | None = None,
        like: CutPoints | None = None,
        positions: Sequence[int] | None = None,
    ) -> None:
        self.chunks = chunks
        self.cuts = cuts
        self.like = like
        self.positions = positions
        self.points = CutPoints((), (), {})

    def apply(self, program: Program) -> None:
        free = replicated(program)
        order = forward_order(program, free)
        if self.positions is not None:
            positions = list(self.positions)
        elif self.like is None:
            positions = choose_cuts(program, self.chunks, self.cuts, free)
        else:
            positions = anchored_cuts(program, order, self.like)
        labels: dict[fx.Node, int] = {}
        for i, node in enumerate(order):
            if is_getitem(node) and node.args[0] in labels:
                labels[node] = labels[node.args[0]]  # type: ignore[index]
                continue
            sources = [labels[n] for n in node.all_input_nodes if n in labels]
            if sources and compat.is_view(node):
                # a view costs nothing, and its copy for the backward must lie with what was made there
                labels[node] = max(sources)
            else:
                labels[node] = max([bisect.bisect_right(positions, i), *sources])
        self.points = CutPoints.of(program, order, positions, labels)
        self._backward(program, free, labels)
        for node in program.graph.nodes:
            node.meta.pop(CHUNK, None)
        for node, label in labels.items():
            node.meta[CHUNK] = label
        program.chunks = self.chunks

    def _backward(self, program: Program, free: set[fx.Node], labels: dict[fx.Node, int]) -> None:
        live = program.live()
        ops = [n for n in program.ops() if n.meta[ROLE] == OpRole.BACKWARD and n in live and n not in free]
        by_number: dict[int | None, int] = {}
        for node, label in labels.items():
            number = compat.sequence_number(node)
            if number is not None:
                by_number.setdefault(number, label)
        unsettled: list[fx.Node] = []
        backward = set(ops)
        for node in ops:
            if is_getitem(node):
                labels[node] = labels[node.args[0]]  # type: ignore[index]
                continue
            sources = [labels[n] for n in node.all_input_nodes if n in backward and n in labels]
            own = by_number.get(compat.sequence_number(node))
            accumulates = node.target is torch.ops.aten.add.Tensor and len(sources) == 2
            if sources and (accumulates or own is None):
                labels[node] = min(sources)
            elif own is not None:
                labels[node] = min([own, *sources])
            elif any(
                program.inputs.get(n) is not None and program.inputs[n].kind == "tangent"
                for n in node.all_input_nodes
            ):
                labels[node] = self.chunks - 1
            else:
                unsettled.append(node)
        # made from forward values alone and tied to no forward op (a saved value's copy): it belongs to its users
        for node in reversed(unsettled):
            users = [labels[u] for u in node.users if u in labels]
            if not users:
                raise ProgramError(f"no chunk could be found for {where(node)}")
            labels[node] = min(users)

    def check(self, program: Program) -> None:
        super().check(program)
        free = replicated(program)
        for node in program.live():
            if node.op in ("placeholder", "output") or node in free:
                continue
            chunk = node.meta.get(CHUNK)
            if chunk is None:
                raise ProgramError(f"no chunk could be found for {where(node)}")
            for source in node.all_input_nodes:
                other = source.meta.get(CHUNK)
                if other is None:
                    continue
                forward, came = node.meta[ROLE] == OpRole.FORWARD, source.meta[ROLE] == OpRole.FORWARD
                wrong = (
                    (forward and other > chunk)
                    or (not forward and not came and other < chunk)
                    or (not forward and came and other > chunk)
                )
                if wrong:
                    raise ProgramError(
                        f"{where(node)} is labelled chunk {chunk}, but reads {source.name} of chunk {other}, "
                        "which flows the other way. Cut the model elsewhere (cuts=…), and please report the model."
                    )
