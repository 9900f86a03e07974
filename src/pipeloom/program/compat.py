"""Every private torch name that pipeloom uses, in one place.

Capture rests on torch's ahead-of-time autograd export, whose Python names may change with any torch release.
So this file alone imports them, checks the version, and gives the rest of the house plain words: inputs and
outputs as small dataclasses, predicates on nodes, fake tensors.

Followed: `torch._functorch.aot_autograd.aot_export_joint_with_descriptors` (torch 2.13), and for what an op
costs `torch.utils.flop_counter`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch._functorch._aot_autograd import descriptors as d
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.fx.graph import _BoxedCodeGen
from torch.fx.graph_module import _forward_from_src
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

SUPPORTED = "2.13"

TreeSpec = pytree.TreeSpec
tree_flatten = pytree.tree_flatten
tree_unflatten = pytree.tree_unflatten


def check_torch_version() -> None:
    """Raises RuntimeError when this torch isn't one that capture was built on."""
    if not torch.__version__.startswith(SUPPORTED + "."):
        raise RuntimeError(
            f"pipeloom captures models through private parts of torch {SUPPORTED}; this is torch {torch.__version__}. "
            f"Install torch>={SUPPORTED},<2.14."
        )


@dataclass(frozen=True)
class GraphInput:
    """A placeholder of the joint graph. kind: "param", "buffer", "input" (name: index of the argument), "key"
    (of random draws), "tangent", or "update's tangent" (of a parameter or buffer whose new value needs a
    gradient, which `capture` refuses)."""

    kind: str
    name: str


@dataclass(frozen=True)
class GraphOutput:
    """A value that the joint graph returns. kind: "output" (name: index), "gradient" (name: the input it is of,
    "param:…" or "input:…"), "slot" (name: parameter#index of the use, after gradient_merge), "buffer" (name:
    the buffer that it is the new version of)."""

    kind: str
    name: str


def fake_mode() -> FakeTensorMode:
    """Tensors made under this mode have shape, stride, dtype and device, and no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_tensor(mode: FakeTensorMode, like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A fake twin of a real or meta tensor, on `device` where given."""
    with mode:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device or like.device)


def export_joint(
    module: nn.Module, args: Sequence[Any], mode: FakeTensorMode
) -> tuple[fx.GraphModule, list[tuple[fx.Node, GraphInput]], list[tuple[fx.Node, GraphOutput]]]:
    """The joint forward and backward graph of `module(*args)`, whose parameters and arguments are fake tensors
    of `mode`.

    Returns the graph, its placeholders and its outputs, each described. The ExitStack is closed even on an
    exception: a leaked fake mode would poison every later capture.
    """
    with (
        contextlib.ExitStack() as stack,
        _without_onednn(),
        torch.enable_grad(),  # the caller may be inside a step, which runs without
        fx_traceback.preserve_node_meta(),
        tracing(TracingContext(mode)),
        _tracing_transformers(),
    ):
        exported = aot_export_joint_with_descriptors(stack, module, tuple(args))
        graph_module = exported.graph_module
    placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    output = next(n for n in graph_module.graph.nodes if n.op == "output")
    inputs = [(n, _describe_input(n.meta["desc"])) for n in placeholders]
    values = list(output.args[0])
    outputs = [
        (v, _describe_output(desc))
        for v, desc in zip(values, output.meta["desc"], strict=True)
        if isinstance(v, fx.Node)  # None: the gradient of an input that has none
    ]
    return graph_module, inputs, outputs


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """Its fused LSTM keeps the workspace that its backward needs only while grad mode is on; programs run
    without. (The public `torch.backends.mkldnn.flags` warns about TF32 at every call.)"""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _describe_input(desc: d.AOTInput) -> GraphInput:
    if isinstance(desc, d.ParamAOTInput):
        return GraphInput("param", desc.target)
    if isinstance(desc, d.BufferAOTInput):
        return GraphInput("buffer", desc.target)
    if isinstance(desc, d.PlainAOTInput):
        return GraphInput("input", str(desc.idx))
    if isinstance(desc, d.TangentAOTInput) and isinstance(desc.output, d.PlainAOTOutput):
        return GraphInput("tangent", str(desc.output.idx))
    if isinstance(desc, d.TangentAOTInput) and isinstance(desc.output, d.InputMutationAOTOutput):
        return GraphInput("update's tangent", _describe_input(desc.output.mutated_input).name)
    raise NotImplementedError(
        f"the captured graph has an input that pipeloom can't feed: {desc}. It comes from two inputs of the "
        "model that share memory, from a tensor subclass, or from an op with a hidden state; clone the input, "
        "or rewrite that op."
    )


def _describe_output(desc: d.AOTOutput) -> GraphOutput:
    if isinstance(desc, d.PlainAOTOutput):
        return GraphOutput("output", str(desc.idx))
    if isinstance(desc, d.GradAOTOutput):
        of = _describe_input(desc.grad_of)
        return GraphOutput("gradient", f"{of.kind}:{of.name}")
    if isinstance(desc, d.InputMutationAOTOutput):
        of = _describe_input(desc.mutated_input)
        return GraphOutput("buffer" if of.kind == "buffer" else f"mutated {of.kind}", of.name)
    raise NotImplementedError(
        f"the captured graph has an output that pipeloom can't route: {desc}. It comes from an output that is "
        "a view of an input, or from an op with a hidden state; return a clone instead."
    )


@contextlib.contextmanager
def _tracing_transformers() -> Iterator[None]:
    """transformers builds its attention masks in a form that can be traced only when it knows that it is being
    traced."""
    module: Any = sys.modules.get("transformers.masking_utils")
    if module is None or not hasattr(module, "is_tracing"):
        yield
        return
    original = module.is_tracing
    module.is_tracing = lambda *_a, **_k: True
    try:
        yield
    finally:
        module.is_tracing = original


# ---- annotations --------------------------------------------------------------------------------------------------

_MODULE = "pipeloom_module"
_REGION = "pipeloom_checkpoint"


@contextlib.contextmanager
def annotated_modules(root: nn.Module, names: dict[int, str]) -> Iterator[None]:
    """While open, each op that a module of `root` runs carries the module's name, and each op inside a
    `torch.utils.checkpoint` region the region's number. `names`: id(module) -> name.

    An instance attribute `forward` shadows the class's; the one that a user had set is put back.
    """
    wrapped: list[tuple[nn.Module, Any]] = []
    missing = object()
    try:
        for module in root.modules():
            name = names.get(id(module))
            if name is None or isinstance(
                module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
            ):
                continue
            wrapped.append((module, module.__dict__.get("forward", missing)))
            module.forward = _annotated(module.forward, name)
        with _annotated_checkpoints():
            yield
    finally:
        for module, own in reversed(wrapped):
            if own is missing:
                del module.__dict__["forward"]
            else:
                module.forward = own


def _annotated(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with fx_traceback.annotate({_MODULE: name}):
            try:
                return forward(*args, **kwargs)
            except Exception as error:
                if not getattr(error, "__notes__", None):
                    error.add_note(f"in module {name!r}" if name else "in its own forward")
                raise

    return run


@contextlib.contextmanager
def _annotated_checkpoints() -> Iterator[None]:
    """Exported as it is, a checkpoint region vanishes from the joint graph: its recomputation is traced away. So while
    capturing, `torch.utils.checkpoint` runs its function once and marks the ops instead; the recompute pass
    reads the marks."""
    count = itertools.count()
    generator = torch_checkpoint._checkpoint_without_reentrant_generator
    reentrant = torch_checkpoint.CheckpointFunction

    def marked(*_a: Any, **_k: Any) -> Iterator[None]:
        with fx_traceback.annotate({_REGION: next(count)}):
            yield

    class Marked:
        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
            with fx_traceback.annotate({_REGION: next(count)}):
                return function(*args)

    module: Any = torch_checkpoint
    module._checkpoint_without_reentrant_generator = marked
    module.CheckpointFunction = Marked
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator = generator
        module.CheckpointFunction = reentrant


def module_of(node: fx.Node) -> str:
    """The name of the innermost module that ran the op ("" where none is known)."""
    return str((node.meta.get("custom") or {}).get(_MODULE, ""))


def checkpoint_region(node: fx.Node) -> int | None:
    """The number of the `torch.utils.checkpoint` region of a forward op, if it is in one."""
    region = (node.meta.get("custom") or {}).get(_REGION)
    return None if region is None else int(region)


# ---- modules --------------------------------------------------------------------------------------------------------

_HOOKS = (
    ("_forward_hooks", "forward hook"),
    ("_forward_pre_hooks", "forward pre-hook"),
    ("_backward_hooks", "backward hook"),
    ("_backward_pre_hooks", "backward pre-hook"),
)


def hooks_of(module: nn.Module) -> list[str]:
    """What kinds of hooks a module has."""
    return [what for attribute, what in _HOOKS if getattr(module, attribute, None)]


def tensor_tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's own parameters and buffers, by name, to be replaced in place (assignment would run the
    user's __setattr__)."""
    return module._parameters, module._buffers


# ---- nodes --------------------------------------------------------------------------------------------------------


def is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def mark_backward(node: fx.Node) -> None:
    node.meta["partitioner_tag"] = "is_backward"


def sequence_number(node: fx.Node) -> int | None:
    """The number that ties a backward op to the forward op that it is the derivative of."""
    number = node.meta.get("seq_nr")
    return None if number is None else int(number)


def is_view(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and bool(node.target.is_view)
    )


def is_op(node: fx.Node) -> bool:
    """An op of torch (not a getitem, not a placeholder)."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def schema_of(node: fx.Node) -> Any:
    """The op's schema (arguments with names and defaults)."""
    return node.target._schema  # type: ignore[union-attr]


def signature_of(op: Any) -> str:
    """An op's schema as text: "aten::bernoulli(Tensor self, *, Generator? generator=None) -> Tensor"."""
    return str(op._schema)


def mutates(node: fx.Node) -> bool:
    return is_op(node) and bool(schema_of(node).is_mutable)


def fake_values(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that stand for what the node returns."""
    value = node.meta.get("val")
    found = value if isinstance(value, (tuple, list)) else [value]
    return [t for t in found if isinstance(t, torch.Tensor)]


def evaluated(node: fx.Node) -> Any:
    """The fake value that an op makes of its inputs' fake values."""

    def value(n: fx.Node) -> Any:
        return n.meta["val"]

    return node.target(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value))  # type: ignore[operator]


def storage_key(tensor: torch.Tensor) -> int:
    """The same for tensors that share memory (fake ones included)."""
    return int(tensor.untyped_storage()._cdata)


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_a: Any, **_k: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward_flops(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_a: Any, **_k: Any
) -> int:
    shapes = (gradient.shape, query.shape, key.shape, value.shape)
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


#: what torch's table of floating point operations lacks
_MORE_FLOPS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def costs_like(twin: Any, op: Any, added: int) -> None:
    """Says that `twin` takes as many operations as `op`, whose arguments follow after `added` of its own."""
    count = flop_registry.get(op.overloadpacket)
    if count is not None:
        _MORE_FLOPS[twin.overloadpacket] = lambda *args, **kwargs: count(*args[added:], **kwargs)


def flops_of(node: fx.Node) -> float:
    """Floating point operations of a node, by torch's own table; 0 for ops that it doesn't count."""
    if not is_op(node):
        return 0.0
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    count = flop_registry.get(packet) or _MORE_FLOPS.get(packet)
    if count is None:
        return 0.0

    def fake(a: Any) -> Any:
        return a.meta.get("val") if isinstance(a, fx.Node) else a

    args = fx.map_arg(node.args, fake)
    kwargs = fx.map_arg(node.kwargs, fake)
    try:
        return float(count(*args, **kwargs, out_val=node.meta.get("val")))
    except (AssertionError, TypeError, ValueError, IndexError):
        return 0.0  # the table knows the op, not this form of it: its bytes still count


def boxed(graph: fx.Graph, root: nn.Module, name: str) -> fx.GraphModule:
    """A GraphModule whose call takes one list and empties it, so that an input can be freed at its last use."""
    graph.set_codegen(_BoxedCodeGen())
    return fx.GraphModule(root, graph, name)


#: by far the commonest ops of a transformer: torch's own methods read their arguments faster than an op's schema does
_METHODS = {
    torch.ops.aten.view.default: torch.Tensor.view,
    torch.ops.aten.t.default: torch.Tensor.t,
    torch.ops.aten.transpose.int: torch.Tensor.transpose,
    torch.ops.aten.permute.default: torch.Tensor.permute,
    torch.ops.aten.add.Tensor: torch.Tensor.add,
    torch.ops.aten.mm.default: torch.Tensor.mm,
}
_OP_CALL = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


def straight(module: fx.GraphModule) -> Callable[[list[Any]], tuple[Any, ...]]:
    """The function of a boxed module, with a name bound to each op's entry into the dispatcher. FX's own code finds an
    op through four attributes and calls it through a Python method, which costs about a microsecond an op: a tenth of
    the step of a small model."""
    code = module.graph.python_code("self")
    names = dict(code.globals)

    def bind(match: re.Match[str]) -> str:
        namespace, packet, overload = match.groups()
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        name = f"{namespace}__{packet}__{overload}"
        names[name] = _METHODS.get(op) or (op._op if type(op) is torch._ops.OpOverload else op)
        return f"{name}("

    function = _forward_from_src(_OP_CALL.sub(bind, code.src), names)
    return functools.partial(function, module)


# ---- torch.distributed --------------------------------------------------------------------------------------------


def store_of(prefix: str) -> distributed_c10d.PrefixStore:
    """A part of the default process group's store, under names that begin with `prefix`."""
    return distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())
