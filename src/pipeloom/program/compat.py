"""Every private torch name that pipeloom uses, in one place.

Capture rests on torch's ahead-of-time autograd export, whose Python names may change with any torch release.
So this file alone imports them, checks the version, and gives the rest of the house plain words: inputs and
outputs as small dataclasses, predicates on nodes, fake tensors.

Followed: `torch._functorch.aot_autograd.aot_export_joint_with_descriptors` (torch 2.13).
"""

from __future__ import annotations

import contextlib
import itertools
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
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed import distributed_c10d
from torch.export.graph_signature import InputKind
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental import _config as fx_config
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen
from torch.fx.graph_module import _forward_from_src
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from . import transformers_forms
from .linalg_checks import checked_in_dataflow

SUPPORTED = "2.13"

TreeSpec = pytree.TreeSpec
tree_flatten = pytree.tree_flatten
tree_unflatten = pytree.tree_unflatten


def named_leaves(tree: Any, name: str) -> tuple[list[tuple[str, Any]], TreeSpec]:
    """The leaves of a pytree called `name`, each under its own name ("cache[2][0]"), and the tree's form. None is a
    leaf."""
    found, form = pytree.tree_flatten_with_path(tree)
    return [(name + pytree.keystr(path), leaf) for path, leaf in found], form


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The tree with each tensor in it replaced; other leaves stay."""
    return pytree.tree_map_only(torch.Tensor, function, tree)


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


def read_value(error: BaseException) -> str | None:
    """The op that read a tensor's value, if that is what the error is about."""
    return str(error.func) if isinstance(error, DataDependentOutputException) else None


def made_shape(error: BaseException) -> str | None:
    """The op whose result's shape depends on values, if that is what the error is about."""
    return str(error.func) if isinstance(error, DynamicOutputShapeException) else None


def left_in_place(error: BaseException | None) -> bool:
    """Whether a trace kept changes in place, which is what the error is about."""
    return isinstance(error, AssertionError) and "entirely functional graph" in str(error)


def fake_mode() -> FakeTensorMode:
    """Tensors made under this mode have shape, stride, dtype and device, and no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_tensor(mode: FakeTensorMode, like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A fake twin of a real or meta tensor, on `device` where given."""
    with mode:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device or like.device)


_RESOLVED = {
    torch.ops.aten._conj.default: torch.ops.aten._conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}


def export_joint(
    module: nn.Module, args: Sequence[Any], mode: FakeTensorMode, *, packed: bool = True
) -> tuple[fx.GraphModule, list[tuple[fx.Node, GraphInput]], list[tuple[fx.Node, GraphOutput]]]:
    """The joint forward and backward graph of `module(*args)`, whose parameters and arguments are fake tensors
    of `mode`.

    packed: False for a model of transformers that isn't told where words stand (position_ids). Returns the graph, its
    placeholders and its outputs, each described. The ExitStack is closed even on an
    exception: a leaked fake mode would poison every later capture.
    """
    with (
        contextlib.ExitStack() as stack,
        _without_onednn(),
        torch.enable_grad(),  # the caller may be inside a step, which runs without
        fx_traceback.preserve_node_meta(),
        tracing(TracingContext(mode)),
        transformers_forms.traced(packed=packed),
        _unread_masks(),
        _own_multilabel_margin(),
    ):
        exported = aot_export_joint_with_descriptors(stack, module, tuple(args))
        graph_module = exported.graph_module
        checked_in_dataflow(graph_module.graph)
        _without_tokens(graph_module.graph)
    for node in graph_module.graph.nodes:
        # lazily conjugated (negated) tensors aren't seen while tracing, so nothing that resolves them is in the graph
        node.target = _RESOLVED.get(node.target, node.target)
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
def _own_multilabel_margin() -> Iterator[None]:
    """What torch traces in place of this loss counts labels after the first −1, which the loss itself ignores; without
    it the loss is traced as it is."""
    op = torch.ops.aten.multilabel_margin_loss_forward.default
    replacement = op.py_kernels.pop(torch._C.DispatchKey.Autograd)
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        op.py_kernels[torch._C.DispatchKey.Autograd] = replacement
        op._dispatch_cache.clear()


def _without_tokens(graph: fx.Graph) -> None:
    """Drops the tokens that go from input to output without an op that they order: nothing has an effect any more."""
    output = next(n for n in graph.nodes if n.op == "output")
    ends = zip(output.args[0], output.meta["desc"], strict=True)
    kept = [(v, desc) for v, desc in ends if not (isinstance(v, fx.Node) and _is_token(v))]
    output.args = (tuple(v for v, _ in kept),)
    output.meta["desc"] = [desc for _, desc in kept]
    for node in list(graph.nodes):
        if _is_token(node) and not node.users:
            graph.erase_node(node)


def _is_token(node: fx.Node) -> bool:
    tokens = (d.ForwardTokenAOTInput, d.BackwardTokenAOTInput)
    return node.op == "placeholder" and isinstance(node.meta["desc"], tokens)


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
def _unread_masks() -> Iterator[None]:
    """torch.nn's transformers look into a mask for whether it is causal, where the user doesn't say so: a hint for
    faster kernels, which can't be had while nothing has a value."""
    module: Any = nn.modules.transformer
    original = module._detect_is_causal_mask
    module._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)  # noqa: ARG005
    try:
        yield
    finally:
        module._detect_is_causal_mask = original


@contextlib.contextmanager
def marked_checkpoints(mark: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """While open, what `torch.utils.checkpoint` is given runs once, inside of `mark()`. Exported as it is, a region
    would vanish from the joint graph: its recomputation is traced away."""
    generator = torch_checkpoint._checkpoint_without_reentrant_generator
    reentrant = torch_checkpoint.CheckpointFunction

    def marked(*_a: Any, **_k: Any) -> Iterator[None]:
        with mark():
            yield

    class Marked:
        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
            with mark():
                return function(*args)

    module: Any = torch_checkpoint
    module._checkpoint_without_reentrant_generator = marked
    module.CheckpointFunction = Marked
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator = generator
        module.CheckpointFunction = reentrant


# ---- modules --------------------------------------------------------------------------------------------------------

_HOOKS = (
    ("_forward_hooks", "forward hook"),
    ("_forward_pre_hooks", "forward pre-hook"),
    ("_backward_hooks", "backward hook"),
    ("_backward_pre_hooks", "backward pre-hook"),
)


def hooks_of(module: nn.Module) -> list[str]:
    """What kinds of hooks a module has."""
    found = []
    for attribute, what in _HOOKS:
        hooks = getattr(module, attribute, None) or {}
        if any(not _records_outputs(hook) for hook in hooks.values()):
            found.append(what)
    return found


def _records_outputs(hook: Any) -> bool:
    """Whether a hook is transformers' own, by which a model returns what its layers made: it is traced with them."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def tensor_hooks(tensor: torch.Tensor) -> list[str]:
    """What kinds of hooks a parameter has."""
    hooks = (("_backward_hooks", "gradient hook"), ("_post_accumulate_grad_hooks", "post-accumulate hook"))
    return [what for attribute, what in hooks if getattr(tensor, attribute, None)]


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


def argument(node: fx.Node, name: str) -> Any:
    """The argument of that name that an op is called with; None where it has no such argument."""
    if not is_op(node):
        return None
    for position, described in enumerate(schema_of(node).arguments):
        if described.name == name:
            given = node.args[position] if position < len(node.args) else described.default_value
            return node.kwargs.get(name, given)
    return None


def signature_of(op: Any) -> str:
    """An op's schema as text: "aten::bernoulli(Tensor self, *, Generator? generator=None) -> Tensor"."""
    return str(op._schema)


def mutates(node: fx.Node) -> bool:
    return is_op(node) and bool(schema_of(node).is_mutable)


def changed(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that an op which `mutates` changes in place."""
    arguments = zip(schema_of(node).arguments, node.args, strict=False)
    written = [a for described, a in arguments if described.alias_info and described.alias_info.is_write]
    return [t for a in written if isinstance(a, fx.Node) for t in fake_values(a)]


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


def boxed(graph: fx.Graph, root: nn.Module, name: str) -> fx.GraphModule:
    """A GraphModule whose call takes one list and empties it, so that an input can be freed at its last use."""
    graph.set_codegen(_BoxedCodeGen())
    return lazy_module(root, graph, name)


def lazy_module(root: nn.Module, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """A GraphModule whose code is written when it is first called: a planner cuts many graphs that never run."""
    return _LazyGraphModule(root, graph, name)


def boxed_source(graph: fx.Graph) -> tuple[str, dict[str, Any]]:
    """The source of `def forward(self, args)` of a graph whose call takes one list, and the names that it uses."""
    graph.set_codegen(_BoxedCodeGen())
    code = graph.python_code("self")
    return code.src, dict(code.globals)


def function_of(source: str, names: dict[str, Any]) -> Callable[..., Any]:
    """The `forward` that some source defines. torch's debuggers find its lines."""
    function: Callable[..., Any] = _forward_from_src(source, names)
    return function


def dispatched(op: Any) -> Callable[..., Any]:
    """An op's entry into the dispatcher."""
    return op._op if type(op) is torch._ops.OpOverload else op


# ---- step graphs ---------------------------------------------------------------------------------------------------


def sized_mode() -> FakeTensorMode:
    """A fake mode whose tensors may have sizes that are symbols, as `export_step` needs it."""
    return FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True, export=True)


def export_step(
    module: nn.Module, args: tuple[Any, ...], sizes: tuple[Any, ...], mode: FakeTensorMode, *, masks: bool
) -> torch.export.ExportedProgram:
    """The forward graph of `module(*args)`, as it is: composite ops whole, what is changed in place changed in place.

    The parameters are fakes of `mode`, args are real. sizes: which dimensions are symbols, as `torch.export` takes it;
    a size may then be 0 or 1 too, as far as its range goes. masks: whether transformers builds its masks (else its
    attention stays causal without one, which fast kernels need).
    """
    with (
        torch.no_grad(),
        fx_traceback.preserve_node_meta(),
        tracing(TracingContext(mode)),
        fx_config.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
        _without_stack_traces(),
        transformers_forms.masked(masks),
    ):
        return torch.export.export(module, args, dynamic_shapes=sizes, strict=False)


@contextlib.contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Nobody reads the ops' stack traces, and they take a fifth of the time of an export."""
    before = fx.config.do_not_emit_stack_traces
    fx.config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        fx.config.do_not_emit_stack_traces = before


def graph_inputs(exported: torch.export.ExportedProgram) -> list[tuple[fx.Node, GraphInput]]:
    """The placeholders in order. Kinds: "param", "buffer" (constants of the graph too) and "input", numbered."""
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    kinds = {InputKind.PARAMETER: "param", InputKind.BUFFER: "buffer", InputKind.CONSTANT_TENSOR: "buffer"}
    found = []
    count = itertools.count()
    for node in exported.graph.nodes:
        if node.op != "placeholder":
            continue
        spec = specs[node.name]
        if spec.kind == InputKind.USER_INPUT:
            found.append((node, GraphInput("input", str(next(count)))))
        elif spec.kind in kinds:
            found.append((node, GraphInput(kinds[spec.kind], str(spec.target))))
        else:
            raise NotImplementedError(
                f"the step graph has an input that pipeloom can't feed: {node.name} ({spec.kind})"
            )
    return found


def size_of(value: Any) -> Any:
    """The expression (sympy) of a size that is a symbol or made of symbols; a plain size as it is."""
    return value.node.expr if isinstance(value, torch.SymInt) else value


def size_hint(value: Any) -> int:
    """What a size was in the example."""
    return int(value.node.hint) if isinstance(value, torch.SymInt) else int(value)


def is_size(node: fx.Node) -> bool:
    """An op that returns a size."""
    value = node.meta.get("val")
    return (
        node.op == "call_function" and isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool)
    )


def write_size(graph: fx.Graph, expression: Any, symbols: dict[Any, fx.Node]) -> fx.Node | int:
    """Ops that compute a size from the symbols' nodes, appended at the graph's insertion point."""
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = {symbol: fx.Proxy(node, tracer) for symbol, node in symbols.items()}
    result = sympy_interp(PythonReferenceAnalysis, proxies, expression)
    return result.node if isinstance(result, fx.Proxy) else int(result)


# ---- ops as they are called ---------------------------------------------------------------------------------------


class EachOp(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While open, `call(op, args, kwargs)` stands for each op that torch runs."""

    def __init__(self, call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        with torch._C.DisableTorchFunction():
            return self._call(op, args, dict(kwargs or {}))


def untraced() -> contextlib.AbstractContextManager[Any]:
    """While open, ops on real tensors are run and aren't traced."""
    return _disable_current_modes()


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor is part of a trace, not a constant."""
    return isinstance(tensor, (FunctionalTensor, FakeTensor))


class PosingAs(TorchFunctionMode):
    """While open, meta tensors say that they are on the CPU, so that nobody treats them otherwise; values_of(tensor) is
    what NumPy and Python's lists get of one."""

    def __init__(self, values_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._values_of = values_of

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func == torch.Tensor.device.__get__:
            device = func(*args)
            return torch.device("cpu") if device.type == "meta" else device
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
            with untraced():
                return func(self._values_of(args[0]), *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def whole_inits(call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """While open, `call(function, args, kwargs)` stands for initialisations of torch.nn.init that look at values (they
    draw again what falls outside of their bounds)."""
    original = nn.init._no_grad_trunc_normal_

    def trunc_normal_(*args: Any, **kwargs: Any) -> Any:
        return call(original, args, kwargs)

    nn.init._no_grad_trunc_normal_ = trunc_normal_
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


def is_op_overload(function: Any) -> bool:
    """Whether it is one of torch's ops, not any function."""
    return isinstance(function, torch._ops.OpOverload)


def arguments_of(op: Any) -> list[Any]:
    """The arguments of an op's schema; `is_written(argument)` tells those that it changes in place."""
    return list(op._schema.arguments)


def is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been changed in place."""
    return int(tensor._version)


def bare_twin(module: nn.Module, tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module that has everything of `module` itself but its parameters and buffers, which are those of `tensors`."""
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    parameters, buffers = tensor_tables(module)
    twin.__dict__["_parameters"] = {n: tensors.get(n) for n in parameters}
    twin.__dict__["_buffers"] = {n: tensors.get(n) for n in buffers}
    return twin


# ---- torch.distributed --------------------------------------------------------------------------------------------


def store_of(prefix: str) -> distributed_c10d.PrefixStore:
    """A part of the default process group's store, under names that begin with `prefix`."""
    return distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())
