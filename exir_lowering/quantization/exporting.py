"""A quantised graph as a program again, called as the original is, with its dynamic sizes, state and names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import GraphModule, Node

from exir_lowering import graphs
from exir_lowering._upstream import operators
from exir_lowering._upstream.fakes import known_size
from exir_lowering.errors import InputError, let_through
from exir_lowering.graphs.measures import expression
from exir_lowering.lowered_module import convention
from exir_lowering.verification.sizes import bounds_of, shape_of

Place = tuple[str, int]  # which operand of which node something is


def open_module(program: ExportedProgram) -> tuple[GraphModule, dict[str, torch.Tensor]]:
    """Return a program as a module whose state is its own, and the state that it begins with."""
    if any(map(_writes_elsewhere, program.graph.nodes)):
        # What is in int8 is a copy: it would miss what is written later, and so would others what is written into it.
        try:
            program = program.run_decompositions({})
        except Exception as error:
            let_through(error)
            raise InputError(
                "quantize: the program writes into parts of tensors, and PyTorch cannot make copies of that: "
                f"{type(error).__name__}: {error}. Change the model so that it makes new tensors there."
            ) from error
    module: Any = program.module(check_guards=False)
    module.graph.eliminate_dead_code()
    state: dict[str, torch.Tensor] = {}
    memories: dict[int, dict[str, bool]] = {}  # the buffers in each, and whether they are written
    for node in module.graph.find_nodes(op="get_attr"):
        value = graphs.attribute(module, node.target)
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            written = any(graphs.is_mutating(user) and user.all_input_nodes[0] is node for user in node.users)
            memories.setdefault(value.untyped_storage().data_ptr(), {})[node.target] = written
            state[node.target] = value
    for address, names in memories.items():
        if address and len(names) > 1 and any(names.values()):
            raise InputError(
                f"quantize: the buffers {', '.join(names)} share memory that the program writes: in int8 each would "
                "get separate memory. Register one buffer, and take views of it in forward."
            )
    for name, value in state.items():
        set_attribute(module, name, value.clone())
    return module, state


def _writes_elsewhere(node: Node) -> bool:
    """Return whether a node writes into a tensor that others read by another name."""
    if node.op != "call_function" or not graphs.is_mutating(node):
        return False
    written = node.all_input_nodes[0]
    return len(written.users) > 1 or graphs.is_getitem(written) or operators.is_view(written.target)


def set_attribute(module: GraphModule, name: str, value: torch.Tensor) -> None:
    """Set an attribute of a module or of one in it, a buffer where it is new."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    if hasattr(owner, last):
        setattr(owner, last, value)
    else:
        owner.register_buffer(last, value)


def tidy(module: GraphModule, names: Mapping[Place, str]) -> None:
    """Name weights that became int8 as they were called before, and drop what nothing reads any more."""
    every = graphs.every_node(module)
    used = {".".join((*path, str(node.target))) for path, node in every if node.op == "get_attr"}
    dropped = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]} - used
    for name in dropped:
        path, _, last = name.rpartition(".")
        delattr(module.get_submodule(path), last)
    for user in module.graph.nodes:
        for index, operand in enumerate(user.args):
            name = names.get((user.name, index), "")
            if not name or not isinstance(operand, Node) or operand.op != "call_function":
                continue
            for suffix, node in zip(("", "_scale", "_zero_point"), operand.args, strict=False):
                if isinstance(node, Node) and node.op == "get_attr" and str(node.target).startswith("_"):
                    _rename(module, node, name + suffix)
    module.recompile()


def _rename(module: GraphModule, node: Node, name: str) -> None:
    path, _, last = name.rpartition(".")
    while hasattr(module.get_submodule(path), last):
        last += "_int8"
    value = graphs.attribute(module, str(node.target))
    delattr(module, str(node.target))
    node.target = f"{path}.{last}" if path else last
    set_attribute(module, node.target, value)


def export(module: GraphModule, program: ExportedProgram) -> ExportedProgram:
    """Export a module that takes what a program does; InputError where it became another one in what it takes."""
    called = convention.of_program("forward", program)
    nodes = graphs.user_inputs(program)
    symbols = {s for node in nodes for size in _symbolic(node) for s in expression(size).free_symbols}
    dims = {symbol: _dimension(program, symbol) for symbol in sorted(symbols, key=str)}
    sizes = {symbol: max(dim.min, 2) for symbol, dim in dims.items()}
    sizes.update({symbol: size for symbol, size in _known(nodes).items() if size >= sizes[symbol]})
    shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
    leaves: list[Any] = []
    for node, fixed in zip(nodes, called.inputs, strict=True):
        fake = node.meta.get("val")
        if isinstance(fake, torch.Tensor):
            leaves.append(torch.zeros(shape_of(fake, sizes), dtype=fake.dtype))
            shapes[leaves[-1]] = {i: _scaled(s, dims) for i, s in enumerate(fake.shape) if isinstance(s, torch.SymInt)}
        else:
            leaves.append(fake if fixed is None else fixed.value)
    args, kwargs = called.arguments(leaves)
    try:
        again = torch.export.export(module, args, kwargs, dynamic_shapes=shapes.dynamic_shapes(module, args, kwargs))
    except Exception as error:
        let_through(error)
        raise InputError(
            f"quantize: the quantised program cannot be exported again: {type(error).__name__}: {error}. Export the "
            "model with simpler sizes, or keep in float what the message is about."
        ) from error
    before, after = (_ranges(each) for each in (program, again))
    if before != after:
        raise InputError(
            f"quantize: exporting again changed the input sizes that are allowed from {before} to {after}."
        )
    return again


def _symbolic(node: Node) -> Iterator[torch.SymInt]:
    fake = node.meta.get("val")
    yield from (size for size in getattr(fake, "shape", ()) if not isinstance(size, int))


def _known(nodes: Sequence[Node]) -> dict[Any, int]:
    sizes = [size for node in nodes for size in _symbolic(node) if expression(size).is_Symbol]
    return {expression(size): known for size in sizes if (known := known_size(size)) is not None}


def _dimension(program: ExportedProgram, symbol: Any) -> Any:
    low, high = bounds_of(program, symbol)
    return Dim(str(symbol), min=low, max=high)


def _scaled(size: Any, dims: Mapping[Any, Any]) -> Any:
    """Return a dimension that is a symbol, or a number of times one and something; whatever export finds for others."""
    rest, product = expression(size).as_coeff_Add()
    factor, symbol = product.as_coeff_Mul()
    if symbol not in dims or not (factor.is_Integer and rest.is_Integer):
        return Dim.AUTO
    dim = dims[symbol] if factor == 1 else int(factor) * dims[symbol]
    return dim + int(rest) if rest else dim


def _ranges(program: ExportedProgram) -> list[str]:
    """Return the sizes of the inputs, and the ranges of what is in them, whatever the symbols are called."""
    names: dict[Any, sympy.Symbol] = {}
    sizes = [
        expression(size) for node in graphs.user_inputs(program) for size in getattr(node.meta.get("val"), "shape", ())
    ]
    for symbol in (symbol for size in sizes for symbol in sorted(getattr(size, "free_symbols", ()), key=str)):
        names.setdefault(symbol, sympy.Symbol(f"n{len(names)}"))
    known = {name: program.range_constraints.get(symbol) for symbol, name in names.items()}
    shown = [f"{name} from {each.lower} to {each.upper}" for name, each in known.items() if each is not None]
    return [str(size if isinstance(size, int) else size.subs(names)) for size in sizes] + shown
