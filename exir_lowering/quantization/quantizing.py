"""`quantize`: a program in few bits, by ExecuTorch's and torchao's flows, and what outputs and layers lose by that."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import GraphModule, Interpreter, Node

from exir_lowering import graphs
from exir_lowering._upstream import locks, operators
from exir_lowering._upstream.ambient import neutral, set_aside
from exir_lowering._upstream.fakes import linear_in
from exir_lowering.errors import InputError, did_you_mean, exception_text, explained, few
from exir_lowering.graphs.measures import expression
from exir_lowering.lowered_module import convention
from exir_lowering.lowered_module.bundled import copied
from exir_lowering.quantization import few_bits
from exir_lowering.quantization.results import Errors, LayerError, OutputError, Quantized
from exir_lowering.runtime.inputs import show
from exir_lowering.verification.measure import Difference, Tolerance, measure
from exir_lowering.verification.sizes import bounds_of, shape_of
from exir_lowering.verification.subjects import bind_call

PRECISIONS = ("int8", "8da8w", "8da4w")
LAYER_CALLS = 4  # in how many calls layers are measured: the results of all of them are kept for each
_MASKING = 1e30  # from this magnitude on a constant is there to mask: nothing else is left in a range that holds it

Call = list[Any]  # the values of a call, flat


def quantize(
    program: ExportedProgram,
    calibration: Sequence[Any] | None = None,
    *,
    precision: str | None = None,
    recipe: Any = "xnnpack-int8",
    dynamic: bool = False,
    per_channel: bool = True,
    keep: Sequence[str] = (),
    check: Sequence[Any] | None = None,
) -> Quantized:
    """Quantise a program to 8 or 4 bits, and measure how far its outputs and each layer are from float.

    The program is not changed. The result is called in the same way, and keeps its dynamic sizes and state.

    Args:
        program: A program of `torch.export.export`, before any decomposition.
        calibration: Calls that activation ranges are taken from, in this order: tuples of positional arguments, or
            (args, kwargs). None is for dynamic quantisation only.
        precision: "int8" (the default), weights and activations; "8da8w", weights of linear layers and convolutions,
            with activation ranges that are found in each call; "8da4w", linear layers alone, with 4 bits for a weight.
        recipe: "xnnpack-int8": what ExecuTorch's `XNNPACKQuantizer` quantises, weights symmetrically; or a quantizer
            for torchao's PT2E, which `dynamic`, `per_channel` and `keep` do not change.
        dynamic: Another name of precision="8da8w".
        per_channel: Whether each output channel of a weight has a separate scale; 8da4w has one for each group.
        keep: Paths of modules that stay in float, with their submodules, such as "head" or "blocks.*.proj".
        check: Calls that errors are measured on; by default the calibration calls.

    Returns:
        The program, its errors by output and by layer, and both as text and JSON.

    Raises:
        InputError: There is nothing to quantise, calls are not what the program takes, or a name or option is wrong.
    """
    precision = _read_precision(precision, dynamic, recipe, per_channel)
    dynamic = precision != "int8"
    if isinstance(recipe, str) and recipe != "xnnpack-int8":
        raise InputError(f"quantize: recipe: none is called {recipe!r}; did you mean 'xnnpack-int8'?")
    if not isinstance(program, ExportedProgram) or program.dialect not in ("TRAINING", "ATEN"):
        dialect = f" in the dialect {program.dialect}" if isinstance(program, ExportedProgram) else ""
        raise InputError(
            f"quantize: program: got a {type(program).__name__}{dialect}, expected a program of torch.export.export, "
            "before it is converted: quantise first."
        )
    names = map(graphs.operator_name, filter(graphs.is_operator, program.graph.nodes))
    already = sorted(name for name in names if name.startswith(("quantized_decomposed.", "torchao.")))
    if already:
        raise InputError(f"quantize: program: it is quantised already, as it calls {already[0]}. Give the float one.")
    if calibration is None and not dynamic:
        raise InputError(
            "quantize: calibration: got None, but static quantisation takes the activation ranges from calls. Pass "
            "calibration=[(x,), ...] with a few typical inputs, or dynamic=True."
        )
    calls = [] if calibration is None else _read_calls(program, calibration, "calibration")
    measured = calls if check is None else _read_calls(program, check, "check")
    if isinstance(keep, str):
        raise InputError(f"quantize: keep: got {keep!r}, expected a sequence of module paths, such as ['head'].")
    known = list(dict.fromkeys(path for node in program.graph.nodes for path, _ in graphs.modules(node) if path))
    for pattern in keep:
        if not fnmatch.filter(known, pattern):
            hint = did_you_mean(pattern, known, f" It has {few(known, 3) or 'none'}.")
            raise InputError(f"quantize: keep: no module with an operator is called {pattern!r}.{hint}")
    # What is inside one stays in float with it.
    kept = tuple(path for path in known if any(fnmatch.fnmatchcase(path, pattern) for pattern in keep))
    in_groups = precision == "8da4w"
    each = "group of 32" if in_groups else "channel" if per_channel else "tensor"
    how = f"{'8da4w' if in_groups else recipe}, {'dynamic' if dynamic else 'static'}, per {each}"
    how = how if isinstance(recipe, str) else type(recipe).__name__
    # Torch's interpreter of graphs, its random numbers and what torchao traces with belong to the whole process.
    with locks.conversion(), set_aside(torch.float32, gradients=True), torch.random.fork_rng(devices=()):
        module, state = _open_module(program)
        if in_groups:
            layers, shared = few_bits.find_layers(module, lambda node: _can_be(node, kept))
            kept += tuple(path for path in shared if path not in kept)
        else:
            quantizer = _xnnpack(dynamic, per_channel, kept) if isinstance(recipe, str) else recipe
            module = _call_torchao("prepare_pt2e", module, quantizer)
            layers = _find_layers(module)
        if not layers and not module.graph.find_nodes(op="call_module"):
            raise InputError(
                f"quantize: {how} finds nothing to quantise. Expected linear layers, or without dynamic=True "
                "convolutions and additions too, in float32, as torch.export.export gives them, before "
                "run_decompositions, and not all of them in keep=."
            )
        observers = module.graph.find_nodes(op="call_module")
        for node in observers if not calls else ():  # the calls show the weights to theirs too
            source: Any = node.args[0]
            if source.op == "get_attr":
                with neutral():
                    module.get_submodule(str(node.target))(graphs.attribute(module, str(source.target)))
        _run(module, calls if observers else (), state, None)
        floats: dict[tuple[int, str], Any] = {}  # results of layers in float, by call
        least: dict[str, float] = {}  # the SQNR of each layer

        def keep_layers(number: int, name: str, value: Any) -> Any:
            if name in layers and number < LAYER_CALLS:
                floats[number, name] = value.clone()
            return value

        def compare_layers(number: int, name: str, value: Any) -> Any:
            if name not in layers:
                return value
            least[name] = min(_measure(floats[number, name], value).sqnr, least.get(name, math.inf))
            return floats[number, name].clone()  # for the next layers

        expected = _run(module, measured, state, keep_layers)
        for node in observers:  # search once for a range, and not for each place of it
            observer: Any = module.get_submodule(str(node.target))
            if hasattr(observer, "calculate_qparams"):
                observer.calculate_qparams = functools.cache(observer.calculate_qparams)
        module = _call_torchao("quantize_", module, layers) if in_groups else _call_torchao("convert_pt2e", module)
        got = _run(module, measured, state, lambda *seen: seen[-1])
        called, outputs = convention.of_program("forward", program), list[OutputError]()
        for index, values in enumerate(zip(zip(*expected, strict=True), zip(*got, strict=True), strict=True)):
            if called.outputs[index] is None:  # export fixed it otherwise
                of_tensors = isinstance(values[0][0], torch.Tensor)  # over all calls
                joined = [torch.cat([*map(torch.flatten, side)]) if of_tensors else side[0] for side in values]
                found = _measure(*joined)
                name = called.output_label(index)
                outputs.append(OutputError(name, found.largest, found.sqnr, found.cosine, found.problem))
        _run(module, measured[:LAYER_CALLS], state, compare_layers)
        lost = [dataclasses.replace(one, sqnr=least.get(name, math.nan)) for name, one in layers.items()]
        lost.sort(key=lambda one: one.sqnr)
        errors = Errors(len(measured), check is None and not dynamic, tuple(outputs), tuple(lost))
        return Quantized(_export(module, program), how, errors, kept)


def _read_precision(given: str | None, dynamic: bool, recipe: Any, per_channel: bool) -> str:
    if given is None:
        return "8da8w" if dynamic else "int8"
    if given not in PRECISIONS:
        known = f" Expected {', '.join(PRECISIONS)}; or call model.half() or model.bfloat16() before the export."
        raise InputError(f"quantize: precision: none is called {given!r}.{did_you_mean(given, PRECISIONS, known)}")
    others = {"dynamic=True": dynamic and given == "int8", "per_channel=False": not per_channel and given == "8da4w"}
    if against := [*filter(others.get, others)] + ["a quantizer in recipe="] * (not isinstance(recipe, str)):
        raise InputError(f"quantize: precision: got {given!r} and {against[0]}, expected one of these: they differ.")
    return given


def _read_calls(program: ExportedProgram, given: object, what: str) -> list[Call]:
    """Return calls, flat; InputError if one is not what the program takes."""
    if isinstance(given, Mapping) and len(given) == 1:  # the calls of a method by its name, as `verify` takes them
        (given,) = given.values()
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)) or not given:
        article = "an empty" if isinstance(given, (list, tuple)) else "a"
        raise InputError(
            f"quantize: {what}: got {article} {type(given).__name__}, expected a list of "
            "calls, each a tuple of positional arguments or (args, kwargs), such as [(x,), (y,)]."
        )
    called, nodes = convention.of_program("forward", program), graphs.user_inputs(program)
    calls = [bind_call(f"quantize: {what}: call {number}", called, call) for number, call in enumerate(given)]
    for number, leaves in enumerate(calls):
        for node, label, value in zip(nodes, called.labels, leaves, strict=True):
            fake = node.meta.get("val")
            if isinstance(fake, torch.Tensor):
                fits = isinstance(value, torch.Tensor) and (value.dtype, value.ndim) == (fake.dtype, fake.ndim)
                sizes = zip(fake.shape, value.shape, strict=True) if fits else ()
                if not fits or any(isinstance(size, int) and size != got for size, got in sizes):
                    expected = f"{label} is {show(value)}, expected {show(fake)}"
                    raise InputError(f"quantize: {what}: call {number}: {expected}.")
    return calls


def _call_torchao(name: str, *args: Any) -> GraphModule:
    from torchao.quantization.pt2e import quantize_pt2e

    call = few_bits.quantize_layers if name == "quantize_" else getattr(quantize_pt2e, name)
    advice = "Keep in float what the message is about, or export the model without it"
    with _explained(f"torchao's {name} fails on this program:", advice), warnings.catch_warnings(action="ignore"):
        result: GraphModule = call(*args)
        return result


def _explained(what: str, advice: str) -> AbstractContextManager[None]:
    return explained(lambda error: InputError(f"quantize: {what} {exception_text(error)}. {advice}."))


def _xnnpack(dynamic: bool, per_channel: bool, kept: Collection[str]) -> Any:
    """Return ExecuTorch's quantizer, without what XNNPACK or exactness does not bear."""
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as xnnpack
    from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

    class Quantizer(xnnpack.XNNPACKQuantizer):  # type: ignore[misc]
        # Those for training match nothing here, and take seconds to build.
        SUPPORTED_PATTERNS: ClassVar[Any] = [p for p in xnnpack.XNNPACKQuantizer.SUPPORTED_PATTERNS if not p.is_qat]

        def transform_for_annotation(self, model: GraphModule) -> GraphModule:
            # ExecuTorch's makes float tensors of numbers, those too that integers such as indices are added to.
            whole = {node: node.args for node in model.graph.nodes if _is_whole(node)}
            model = super().transform_for_annotation(model)
            for node, args in whole.items():
                node.args = args
            model.recompile()
            return model

        def annotate(self, model: GraphModule) -> GraphModule:
            model = super().annotate(model)
            for node in filter(_is_whole, model.graph.nodes):  # ExecuTorch asks no filter about `cat`
                node.meta.pop(Q_ANNOTATION_KEY, None)
            return model

    config = xnnpack.get_symmetric_quantization_config(is_per_channel=per_channel, is_dynamic=dynamic)

    return Quantizer().set_global(config).set_filter_function(lambda node: _can_be(node, kept))


def _is_whole(node: Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, torch.Tensor) and not value.is_floating_point()


def _can_be(node: Node, kept: Collection[str]) -> bool:
    """Return whether a node may be int8: state, masks, integers stay exact; XNNPACK needs operands with dimensions."""
    if any(path in kept for path, _ in graphs.modules(node)):
        return False
    if node.op != "call_function":
        return True
    module: Any = node.graph.owning_module
    held = [each for each in node.all_input_nodes if each.op == "get_attr"]
    if graphs.is_mutating(node) and node.all_input_nodes[0] in held:
        return False
    for value in (graphs.attribute(module, str(each.target)) for each in held):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and (value.abs() >= _MASKING).any():
            return False
    values = [each.meta.get("val") for each in node.all_input_nodes if each not in held]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return not _is_whole(node) and all(value.ndim and value.is_floating_point() for value in tensors)


def _find_layers(prepared: GraphModule) -> dict[str, LayerError]:
    """Return the operators in int8, by the names of their nodes."""
    layers = {}
    for node in prepared.graph.nodes:
        annotation: Any = node.meta.get("quantization_annotation")
        if node.op != "call_function" or annotation is None or not annotation.input_qspec_map:
            continue
        if any(hasattr(spec, "dtype") for spec in annotation.input_qspec_map.values()):
            observed = (one.args[0] for one in node.args if isinstance(one, Node) and one.op == "call_module")
            held = [str(one.target) for one in observed if isinstance(one, Node) and one.op == "get_attr"]
            weights = [graphs.attribute(prepared, name) for name in held]
            size = sum(weight.numel() * (weight.element_size() - 1) for weight in weights)
            layers[node.name] = LayerError(graphs.module_stack(node), graphs.operator_name(node), math.nan, size)
    return layers


class _Run(Interpreter):
    """Runs a graph; observers observe nothing, and each node goes through a function with its result."""

    def __init__(self, module: GraphModule, see: Callable[[str, Any], Any]) -> None:
        super().__init__(module)
        self.extra_traceback, self._see = False, see

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        computes = isinstance(self.fetch_attr(target), torch.nn.Linear)
        return super().call_module(target, args, kwargs) if computes else args[0]

    def run_node(self, n: Node) -> Any:
        return self._see(n.name, super().run_node(n))


def _run(
    module: GraphModule,
    calls: Sequence[Call],
    state: Mapping[str, torch.Tensor],
    see: Callable[[int, str, Any], Any] | None,
) -> list[Any]:
    """Return the outputs of each call, with the state of one for the next one; without `see`, observers observe.

    It takes the number of a call, the name of a node and its result, and returns the result.
    """
    results, advice = [], "Give values that the model takes, in the shapes of its export"
    with neutral():
        torch.manual_seed(0)  # in float and in int8 a call draws the same numbers
        try:
            for number, call in enumerate(calls):
                with _explained(f"PyTorch refuses call {number}:", advice):
                    run = Interpreter(module) if see is None else _Run(module, functools.partial(see, number))
                    result = run.run(*copied(call), enable_io_processing=False)
                results.append(copied(result))
        finally:
            for name in {str(node.target) for node in module.graph.find_nodes(op="get_attr")} & state.keys():
                graphs.attribute(module, name).copy_(state[name])
    return results


def _measure(expected: Any, got: Any) -> Difference:
    found = measure(expected, got, Tolerance(None, True, torch.float32), 0.0, None)
    return dataclasses.replace(found, sqnr=-math.inf, cosine=math.nan) if found.problem else found


def _open_module(program: ExportedProgram) -> tuple[GraphModule, dict[str, torch.Tensor]]:
    """Return a program as a module whose state is its own, and the state that it begins with."""
    written = [node.all_input_nodes[0] for node in filter(graphs.is_mutating, program.graph.nodes)]
    if any(len(one.users) > 1 or graphs.is_getitem(one) or operators.is_view(one.target) for one in written):
        # Others read it by another name. What is in int8 is a copy: it would miss what is written later, and so would
        # others what is written into it.
        what = "the program writes into parts of tensors, and PyTorch cannot make copies of that:"
        with _explained(what, "Make new tensors there in the model"):
            program = program.run_decompositions({})
    module: Any = program.module(check_guards=False)
    module.graph.eliminate_dead_code()
    state: dict[str, torch.Tensor] = {}
    memories: dict[int, dict[str, bool]] = {}  # the buffers in each, and whether they are written
    for node in module.graph.find_nodes(op="get_attr"):
        value = graphs.attribute(module, node.target)
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            writes = any(graphs.is_mutating(user) and user.all_input_nodes[0] is node for user in node.users)
            memories.setdefault(value.untyped_storage().data_ptr(), {})[node.target] = writes
            state[node.target] = value
    for address, names in memories.items():
        if address and len(names) > 1 and any(names.values()):
            text = "share memory that the program writes. Register one buffer, and take views of it in forward"
            raise InputError(f"quantize: the buffers {', '.join(names)} {text}.")
    for name, value in state.items():
        path, _, last = name.rpartition(".")
        setattr(module.get_submodule(path), last, value.clone())
    return module, state


def _export(module: GraphModule, program: ExportedProgram) -> ExportedProgram:
    """Export a module that takes what a program does; InputError where it became another one in what it takes."""
    used = {".".join((*path, str(node.target))) for path, node in graphs.every_node(module) if node.op == "get_attr"}
    layers = tuple(f"{node.target}." for node in module.graph.find_nodes(op="call_module"))
    for name in {name for name, _ in [*module.named_parameters(), *module.named_buffers()]} - used:
        path, _, last = name.rpartition(".")
        if not name.startswith(layers):
            delattr(module.get_submodule(path), last)  # a weight in float that is int8 now
    called = convention.of_program("forward", program)
    fakes = [node.meta.get("val") for node in graphs.user_inputs(program)]
    shown = [size for fake in fakes for size in getattr(fake, "shape", ()) if not isinstance(size, int)]
    symbols = sorted({symbol for size in shown for symbol in expression(size).free_symbols}, key=str)
    bounds = {symbol: bounds_of(program, symbol) for symbol in symbols}
    dims: dict[Any, Any] = {symbol: Dim(str(symbol), min=low, max=high) for symbol, (low, high) in bounds.items()}
    sizes = {symbol: min(max(dim.min, 2), dim.max) for symbol, dim in dims.items()}
    shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
    leaves: list[Any] = []
    for fake, fixed in zip(fakes, called.inputs, strict=True):
        if isinstance(fake, torch.Tensor):
            leaves.append(torch.zeros(shape_of(fake, sizes), dtype=fake.dtype))
            shapes[leaves[-1]] = {i: _scaled(s, dims) for i, s in enumerate(fake.shape) if isinstance(s, torch.SymInt)}
        else:
            leaves.append(fake if fixed is None else fixed.value)
    args, kwargs = called.arguments(leaves)
    advice = "Export the model with simpler sizes, or keep in float what this is about"
    with _explained("the quantised program cannot be exported again:", advice):
        return torch.export.export(module, args, kwargs, dynamic_shapes=shapes.dynamic_shapes(module, args, kwargs))


def _scaled(size: Any, dims: Mapping[Any, Any]) -> Any:
    """Return a dimension that is a symbol, or a number of times one and something; whatever export finds for others."""
    symbol, factor, rest = linear_in(size) or (None, 0, 0)
    if symbol not in dims:
        return Dim.AUTO
    dim = dims[symbol] if factor == 1 else factor * dims[symbol]
    return dim + rest if rest else dim
