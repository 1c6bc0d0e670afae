"""Step edge: from `torch.export` output to Edge dialect; the partitioners say what not to decompose."""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node
from torch.fx.passes.infra.pass_manager import PassManager as FxPassManager

from exir_lowering import fast, graphs
from exir_lowering._upstream import pins
from exir_lowering._upstream.edge import SpecViolationError, gen_edge_manager, transform
from exir_lowering._upstream.passes import mending_passes
from exir_lowering._upstream.tensors import version
from exir_lowering.errors import InputError, LoweringError, PartitionerContractError, exception_text
from exir_lowering.graphs import measures
from exir_lowering.graphs.copies import private_copy
from exir_lowering.model import Adjustment, EdgeMethod
from exir_lowering.options import LoweringOptions
from exir_lowering.plugins import asking
from exir_lowering.steps import edge_errors
from exir_lowering.steps.arguments import Passes, RequestedMethod, is_edge, require_edge
from exir_lowering.steps.control_flow import check_carried
from exir_lowering.steps.conversion_context import converting
from exir_lowering.steps.host_memory import make_inputs_contiguous, odd_inputs
from exir_lowering.steps.nested_constants import lift_nested
from exir_lowering.steps.one_memory import unite
from exir_lowering.steps.provenance import check_declared
from exir_lowering.steps.session import Session
from exir_lowering.steps.size_functions import IN_FILES, SPELLED, spell
from exir_lowering.steps.write_back import check_written, separate

_EXPECTED = (
    "A pass takes the graph module and returns a PassResult, a GraphModule, or None if it changed the one it was "
    "given; or it is an ExportedProgramPassBase."
)

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_CONTIGUOUS: dict[str, Any] = {"memory_format": torch.contiguous_format}
_EMPTY = frozenset({torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default})


def to_edge(
    methods: Iterable[RequestedMethod], session: Session, *, decomposed: bool = False
) -> tuple[EdgeMethod, ...]:
    """Convert programs as ExecuTorch's `to_edge_transform_and_lower` does; if `decomposed`, nothing is decomposed."""
    methods = unite(methods)
    for method in methods:
        check_written(method.name, method.program)
        check_carried(method.name, method.program)
    with session.timed("edge"):
        converted = tuple(
            _edge(method, session, decomposed)
            for method in session.progress.each("convert to Edge dialect", [*methods])
        )
        check_declared(converted)
    return converted


def as_edge(methods: Iterable[RequestedMethod]) -> tuple[EdgeMethod, ...]:
    """Accept programs in Edge dialect as they are; InputError if one is not, or fails `check_written`."""
    accepted = []
    for method in methods:
        require_edge(method.name, method.program)
        check_written(method.name, method.program)
        accepted.append(EdgeMethod(method.name, _with_parameters_as_state(method.program), method.partitioners))
    return tuple(accepted)


def _edge(method: RequestedMethod, session: Session, decomposed: bool) -> EdgeMethod:
    """Convert a program, unless it is in Edge dialect, and run the passes over it."""
    if is_edge(method.program) and method.passes is None:
        return as_edge([method])[0]
    options = session.options
    context = converting([method.program], gradients=True, fast=options.fast)
    listening = asking.listen(options.on_backend_error == "raise")
    with context, mending_passes(), fast.accelerated(options.fast), listening as heard:
        origin, left = None if is_edge(method.program) else method.program, tuple[str, ...]()
        try:
            edge, left = _convert_views(method, options, decomposed) if origin else (private_copy(method.program), left)
        except PartitionerContractError as error:
            text = f"Converting method {method.name!r} to Edge dialect: {error}"
            raise PartitionerContractError(text, violation=error.violation, details=error.details) from error.__cause__
        except (LoweringError, MemoryError):
            raise
        except Exception as error:
            off = pins.explain("sizes without guards") if method.program.range_constraints else ""
            raise InputError(
                f"Method {method.name!r} could not be converted to Edge dialect: {exception_text(error)}{off}"
            ) from error
        if origin:
            spell(edge)  # torch writes checks of sizes once more
            _recover_sources(origin, edge)
        if method.passes is not None:
            edge = _run_passes(method.name, edge, method.passes)
    adjustments = (
        Adjustment(method.name, "decomposed", (node.name,), f"{reason}; {graphs.source_line(node)}", by)
        for node, reasons in heard.failed.items()
        for reason, by in reasons.items()
    )
    program, once = _with_parameters_as_state(edge), tuple(dict.fromkeys(adjustments))  # of all copies
    return EdgeMethod(method.name, program, method.partitioners, origin, left, once)


def _convert_views(
    method: RequestedMethod, options: LoweringOptions, decomposed: bool
) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Convert a program; if that fails, with copies of attention: decomposed, it is not contiguous, and views fail."""
    try:
        return _convert(method, options, decomposed)
    except ValueError:
        private = private_copy(method.program)
        attention = [node for _, node in graphs.every_node(private.graph_module) if node.target is _ATTENTION]
        if not attention:
            raise
    for node in attention:
        with node.graph.inserting_after(node):
            copied = node.graph.call_function(torch.ops.aten.clone.default, (node,), _CONTIGUOUS)
        copied.meta = dict(node.meta)
        node.replace_all_uses_with(copied, partial(operator.is_not, copied))
    return _convert(replace(method, program=private), options, decomposed)


def _convert(
    method: RequestedMethod, options: LoweringOptions, decomposed: bool
) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Convert a program, with what partitioners keep whole; return also what was left to ExecuTorch, and why."""
    name, left, config = method.name, tuple[str, ...](), _config(options)
    partitioners = [asking.Decomposing(one) for one in method.partitioners]
    if options.fast:
        private = _private_copy(method.program)
        made, left = fast.convert(name, private, partitioners, _config(options), decomposed=decomposed)
        if made is not None:
            return made, left
    for distinct in (False, True):
        private = _private_copy(method.program, distinct=distinct)
        try:
            manager = gen_edge_manager({name: partitioners}, {name: private}, config, None)
            break
        except SpecViolationError:  # of one value that is written twice
            if distinct:
                raise
    return manager.exported_program(name), left


def as_convertible(program: ExportedProgram) -> ExportedProgram:
    """Return a program that ExecuTorch's own conversion takes: a copy where it would fail on inputs or sizes."""
    functions = SPELLED if is_edge(program) else IN_FILES  # once, as remainders are made of remainders
    odd = functions is IN_FILES and any(odd_inputs(program))
    spelled = any(node.target in functions for _, node in graphs.every_node(program.graph_module))
    if not odd and not spelled and not _vector_layers(program):
        return program
    private = private_copy(program)
    _take_vectors(private)
    spell(private, functions)
    if odd:
        make_inputs_contiguous(private)
    return private


def _private_copy(program: ExportedProgram, *, distinct: bool = False) -> ExportedProgram:
    """Copy a program for a conversion, which may write state in another order; see `separate`."""
    private = private_copy(program)
    # ExecuTorch removes parameters that are not read, whether they are written or not.
    lifted = graphs.lifted_inputs(private)
    _with_state(private, {lifted[node].target for node in edge_errors.list_written(private)})
    _fill_empty(private)
    _take_vectors(private)
    spell(private)
    lift_nested(private)
    make_inputs_contiguous(private)
    separate(private, distinct=distinct)
    return private


def _fill_empty(private: ExportedProgram) -> None:
    """Fill what has dynamic sizes and no content: ExecuTorch's operator for it takes numbers, those of the example."""
    for _, node in graphs.every_node(private.graph_module):
        value: Any = node.meta.get("val")
        if node.target is torch.ops.aten.empty_like.default:  # its decomposition is no core operator
            node.target, node.args = torch.ops.aten.full_like.default, (node.args[0], 0)
        elif node.target in _EMPTY and not all(type(size) is int for size in value.shape):
            sizes = graphs.argument(node, "size")
            node.target = torch.ops.aten.full.default
            node.args, node.kwargs = (sizes, 0), {"dtype": value.dtype, "device": value.device}


def _vector_layers(program: ExportedProgram) -> list[Node]:
    """Return the linear layers whose weight is a vector: XNNPACK takes them, and fails on them at run time."""
    linear = torch.ops.aten.linear.default
    layers = [node for _, node in graphs.every_node(program.graph_module) if node.target is linear]
    return [
        node for node in layers if any(one.dim() == 1 for one in measures.tensors(_operands(node)[1].meta.get("val")))
    ]


def _take_vectors(private: ExportedProgram) -> None:
    """Make products of linear layers whose weight is a vector, and add the bias, a number."""
    for node in _vector_layers(private):
        *factors, bias = _operands(node)
        product = node
        if bias is not None:
            with node.graph.inserting_before(node):
                product = node.graph.call_function(torch.ops.aten.matmul.default)
            product.meta = dict(node.meta)
            node.target, node.args, node.kwargs = torch.ops.aten.add.Tensor, (product, bias), {}
        product.target, product.args, product.kwargs = torch.ops.aten.matmul.default, tuple(factors), {}


def _operands(node: Node) -> list[Any]:
    return [graphs.argument(node, name) for name in ("input", "weight", "bias")]


def _with_parameters_as_state(program: ExportedProgram) -> ExportedProgram:
    """Return a program whose written parameters are buffers: ExecuTorch takes parameters for constants."""
    signature = program.graph_signature
    written = {spec.target for spec in signature.output_specs if spec.kind is OutputKind.PARAMETER_MUTATION}
    return _with_state(private_copy(program), written) if written else program


def _with_state(copied: ExportedProgram, names: Collection[str | None]) -> ExportedProgram:
    """Make parameters buffers, in a private copy."""
    for spec in copied.graph_signature.input_specs:
        if spec.kind is InputKind.PARAMETER and spec.target is not None and spec.target in names:
            spec.kind, spec.persistent = InputKind.BUFFER, True
            copied.state_dict[spec.target] = copied.state_dict[spec.target].detach()
    for spec in copied.graph_signature.output_specs:
        if spec.kind is OutputKind.PARAMETER_MUTATION:
            spec.kind = OutputKind.BUFFER_MUTATION
    return copied


def _recover_sources(program: ExportedProgram, converted: ExportedProgram) -> None:
    """Restore source lines where the conversion, inlining a graph, left those of generated code, by their names."""
    traces: dict[str, set[str]] = {}
    for _, node in graphs.every_node(program.graph_module):
        if graphs.source_line(node):
            traces.setdefault(node.name, set()).add(node.meta["stack_trace"])
    for _, node in graphs.every_node(converted.graph_module):
        found = traces.get(graphs.generated_name(node), ())
        if len(found) == 1:
            (node.meta["stack_trace"],) = found


def _run_passes(name: str, program: ExportedProgram, passes: Passes) -> ExportedProgram:
    """Run passes, which may change the program, and check that they made one and wrote to no tensor."""
    named = {**program.state_dict, **program.constants}.items()
    tensors = {label: (value, version(value)) for label, value in named if isinstance(value, torch.Tensor)}
    listed: Sequence[Any] = passes.passes if isinstance(passes, FxPassManager) else passes
    names = ", ".join(getattr(one, "__name__", type(one).__name__) for one in listed)
    who = f"Method {name!r}: transform_passes ({names})"
    try:
        result = transform(program, passes)
    except MemoryError:
        raise
    except Exception as error:
        # ExecuTorch's own error names the pass, its cause says what was wrong.
        chain, cause = list[str](), error
        while cause is not None and len(chain) < 4:
            chain.append(exception_text(cause).rstrip("."))
            cause = cause.__cause__  # type: ignore[assignment]
        raise InputError(f"{who} failed: {'; '.join(chain)}. {_EXPECTED}") from error
    if not isinstance(result, ExportedProgram) or not is_edge(result):
        made = f"a program in {result.dialect} dialect" if isinstance(result, ExportedProgram) else repr(result)
        raise InputError(f"{who} made {made}, expected a program in Edge dialect. {_EXPECTED}")
    written = [label for label, (tensor, before) in tensors.items() if version(tensor) != before]
    if written:
        raise InputError(
            f"{who} wrote into {written}, tensors of the model. Put new tensors into the program's state_dict or "
            "constants instead."
        )
    return result


def _config(options: LoweringOptions) -> EdgeCompileConfig:
    """Copy the configuration, to which ExecuTorch appends, without its check: the step `legalize` has a better one."""
    return replace(copy.deepcopy(options.edge_compile_config or EdgeCompileConfig()), _check_ir_validity=False)
