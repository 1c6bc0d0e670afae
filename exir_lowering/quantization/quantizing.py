"""`quantize`: the line from a program in float, through calibration, to one in int8 and how far it is off."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node

from exir_lowering import graphs
from exir_lowering._upstream import locks
from exir_lowering._upstream.ambient import neutral, set_aside
from exir_lowering._upstream.likeness import SYMBOLS
from exir_lowering.errors import InputError, let_through
from exir_lowering.lowered_module import convention
from exir_lowering.quantization.exporting import export, open_module, tidy
from exir_lowering.quantization.layers import Layers, Run, find_layers, in_float
from exir_lowering.quantization.recipes import Kept, Recipe
from exir_lowering.quantization.results import Errors, LayerError, OutputError, Quantized
from exir_lowering.runtime.inputs import show
from exir_lowering.verification.eager import copied
from exir_lowering.verification.measure import Difference, Tolerance, measure
from exir_lowering.verification.subjects import bind_call

Call = list[Any]  # the values of a call, flat
Watch = Callable[[int, Node, Any], None]  # is given each operator of a call, by the call's number, with its value
LAYER_CALLS = 4  # how many calls the layers are measured in: each is run once more for each layer

_TOLERANCE = Tolerance(None, True, torch.float32)


def quantize(
    program: ExportedProgram,
    calibration: Sequence[Any] | None = None,
    *,
    recipe: str = "xnnpack-int8",
    dynamic: bool = False,
    per_channel: bool = True,
    keep: Sequence[str] = (),
    check: Sequence[Any] | None = None,
) -> Quantized:
    """Quantise a program to int8, and measure how far its outputs and each layer are from float.

    The program is not changed. The result is called in the same way, and keeps its dynamic sizes and state.

    Args:
        program: A program of `torch.export.export`, before any decomposition.
        calibration: Calls that activation ranges are taken from, in this order: tuples of positional arguments, or
            (args, kwargs). None is for dynamic quantisation only.
        recipe: "xnnpack-int8": what ExecuTorch's `XNNPACKQuantizer` quantises, weights symmetrically.
        dynamic: Whether only the weights of linear layers and convolutions are int8, and activation ranges are found in
            each call.
        per_channel: Whether each output channel of a weight has a separate scale.
        keep: Paths of modules that stay in float, with their submodules, such as "head" or "blocks.*.proj".
        check: Calls that errors are measured on; by default the calibration calls.

    Returns:
        The program, its errors by output and by layer, and both as text and JSON.

    Raises:
        InputError: There is nothing to quantise, calls are not what the program takes, or a name is unknown.
    """
    how, kept = Recipe(recipe, dynamic, per_channel), Kept(keep)
    _check_program(program)
    calls, measured = _read(program, calibration, check, dynamic)
    # Torch's interpreter of graphs, its random numbers and what torchao traces with belong to the whole process.
    with locks.conversion(), set_aside(torch.float32, gradients=True), torch.random.fork_rng(devices=()):
        module, state = open_module(program)
        module = _prepare(module, how, kept)
        layers = find_layers(module)
        _observe(module, calls, state)
        floats, seen = _run_float(module, layers, measured, state)
        _remember_ranges(module)
        module = _call_torchao("convert_pt2e", module)
        meter = _Meter(module, layers, measured, state, floats)
        lost, ranged = meter.measure_layers(seen), check is None and not dynamic
        errors = Errors(len(measured), ranged, meter.measure_outputs(program), lost)
        tidy(module, layers.names)
        return Quantized(export(module, program), str(how), errors, tuple(kept.layers))


def _read(program: ExportedProgram, calibration: object, check: object, dynamic: bool) -> tuple[list[Call], list[Call]]:
    """Return the calls to take ranges from, and those to measure."""
    if calibration is None and not dynamic:
        raise InputError(
            "quantize: calibration: got None, but static quantisation takes the activation ranges from calls. Pass "
            "calibration=[(x,), ...] with a few typical inputs, or dynamic=True."
        )
    calls = [] if calibration is None else _read_calls(program, calibration, "calibration")
    return calls, calls if check is None else _read_calls(program, check, "check")


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
    calls = []
    for number, call in enumerate(given):
        where = f"quantize: {what}: call {number}"
        leaves = bind_call(where, called, call)
        for node, label, value in zip(nodes, called.labels, leaves, strict=True):
            _check(f"{where}: {label}", node.meta.get("val"), value)
        calls.append(leaves)
    return calls


def _check(who: str, fake: Any, value: Any) -> None:
    if not isinstance(fake, torch.Tensor):
        return
    fits = isinstance(value, torch.Tensor) and value.dtype == fake.dtype and value.ndim == fake.ndim
    if not fits or any(isinstance(a, int) and a != b for a, b in zip(fake.shape, value.shape, strict=True)):
        raise InputError(f"{who} is {show(value)}, expected {show(fake)}.")


def _check_program(program: object) -> None:
    if not isinstance(program, ExportedProgram):
        raise InputError(
            f"quantize: program: got a {type(program).__name__}, expected a program of torch.export.export."
        )
    if program.dialect not in ("TRAINING", "ATEN"):
        raise InputError(
            f"quantize: program: it is in the dialect {program.dialect}, expected one of torch.export.export, before "
            "it is converted: quantise first."
        )
    for node in graphs.user_inputs(program):
        if isinstance(node.meta.get("val"), SYMBOLS):
            raise InputError(
                f"quantize: program: its input {node.name} is a number that may differ in each call, and PyTorch "
                "cannot export that again. Export the model with a fixed number, or with a tensor in its place."
            )
    names = {graphs.operator_name(node) for node in program.graph.nodes if node.op == "call_function"}
    already = sorted(name for name in names if name.startswith(("quantized_decomposed.", "torchao.")))
    if already:
        raise InputError(
            f"quantize: program: it is quantised already, as it calls {already[0]}. Give the float program."
        )


def _prepare(module: GraphModule, how: Recipe, kept: Kept) -> GraphModule:
    """Put observers where a recipe wants int8."""
    operators = dict.fromkeys(graphs.operator_name(node) for node in module.graph.nodes if node.op == "call_function")
    module = _call_torchao("prepare_pt2e", module, how.make(kept.allows))
    kept.check()
    if not module.graph.find_nodes(op="call_module"):
        reason = "all of it is kept in float" if kept.layers else f"it has {', '.join(operators) or 'no operators'}"
        raise InputError(
            f"quantize: {how} finds nothing to quantise: {reason}. Expected linear layers"
            f"{'' if how.dynamic else ', convolutions, additions'} in float32, as torch.export.export gives them, "
            "before run_decompositions."
        )
    return module


def _call_torchao(name: str, *args: Any) -> GraphModule:
    from torchao.quantization.pt2e import quantize_pt2e

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result: GraphModule = getattr(quantize_pt2e, name)(*args)
            return result
    except Exception as error:
        let_through(error)
        raise InputError(
            f"quantize: torchao's {name} fails on this program: {type(error).__name__}: {error}. Keep in float what "
            "the message is about, or export the model without it."
        ) from error


def _observe(module: GraphModule, calls: Sequence[Call], state: Mapping[str, torch.Tensor]) -> None:
    """Show the calls to the observers, or without any the weights to theirs."""
    if calls:
        _run_calls(lambda _: Interpreter(module), module, calls, state)
        return
    for node in module.graph.find_nodes(op="call_module"):
        (source,) = node.args
        if isinstance(source, Node) and source.op == "get_attr":
            with neutral():
                module.get_submodule(str(node.target))(graphs.attribute(module, str(source.target)))


def _remember_ranges(module: GraphModule) -> None:
    """Let each observer search for its range once, which takes most of a conversion, and not for each of its places."""
    for node in module.graph.find_nodes(op="call_module"):
        observer: Any = module.get_submodule(str(node.target))
        if hasattr(observer, "calculate_qparams"):
            observer.calculate_qparams = functools.cache(observer.calculate_qparams)


def _run_float(
    module: GraphModule, layers: Layers, calls: Sequence[Call], state: Mapping[str, torch.Tensor]
) -> tuple[list[Call], list[dict[str, Any]]]:
    """Return the outputs of each call in float, and those of the layers in the first of them."""
    wanted = {layer.output for layer in layers.all}
    seen: list[dict[str, Any]] = [{} for _ in calls[:LAYER_CALLS]]

    def keep(number: int, node: Node, value: Any) -> None:
        if number < len(seen) and node.name in wanted:
            seen[number][node.name] = value.clone()

    return _run_calls(lambda number: Run(module, functools.partial(keep, number)), module, calls, state), seen


def _run_calls(
    start: Callable[[int], Interpreter], module: GraphModule, calls: Sequence[Call], state: Mapping[str, torch.Tensor]
) -> list[Any]:
    """Return the outputs of each call, with the state of one call for the next one, as what is started gives them."""
    results = []
    with neutral():
        torch.manual_seed(0)  # in float and in int8 a call draws the same numbers
        try:
            for number, call in enumerate(calls):
                try:
                    result = start(number).run(*copied(call), enable_io_processing=False)
                except Exception as error:
                    let_through(error)
                    raise InputError(
                        f"quantize: PyTorch refuses call {number}: {type(error).__name__}: {error}. Give values that "
                        "the model takes, in shapes that it was exported for."
                    ) from error
                results.append(copied(result))
        finally:
            names = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
            for name in names & state.keys():
                graphs.attribute(module, name).copy_(state[name])
    return results


@dataclass(frozen=True, slots=True, eq=False)
class _Meter:
    """Measures a quantised graph against the outputs in float."""

    module: GraphModule
    layers: Layers
    calls: Sequence[Call]
    state: Mapping[str, torch.Tensor]
    floats: Sequence[Call]

    def measure_outputs(self, program: ExportedProgram) -> tuple[OutputError, ...]:
        """Return the error of each output, over all calls."""
        if not self.calls:
            return ()
        called = convention.of_program("forward", program)
        first = len(called.written)
        return tuple(
            OutputError(
                called.output_label(first + index).removeprefix("its output "),
                each.largest,
                each.sqnr,
                each.cosine,
                each.problem,
            )
            for index, each in enumerate(self._compare(self.calls))
            if not called.is_fixed(first + index)
        )

    def measure_layers(self, seen: Sequence[Mapping[str, Any]]) -> tuple[LayerError, ...]:
        """Return the error of each layer, and what is gained by keeping it in float: those that gain most first."""
        calls = self.calls[: len(seen)]
        at: dict[str, float] = {}

        def compare(number: int, node: Node, value: Any) -> None:
            if node.name in seen[number]:
                found = _measure(seen[number][node.name], value).sqnr
                at[node.name] = min(found, at.get(node.name, math.inf))

        whole = _least(self._compare(calls, compare)) if calls else math.nan
        found = []
        for layer in self.layers.all:
            gain = math.nan
            if calls:
                with in_float(self.module, layer, self.layers):
                    alone = _least(self._compare(calls))
                gain = 0.0 if alone == whole else alone - whole
            size = sum(weight.numel() * (weight.element_size() - 1) for weight in layer.weights.values())
            found.append(LayerError(layer.path, layer.operator, at.get(layer.output, math.nan), gain, size))
        return tuple(sorted(found, key=lambda each: (-each.gain, each.sqnr)))

    def _compare(self, calls: Sequence[Call], watch: Watch = lambda *_: None) -> list[Difference]:
        """Return how far each output is off over some calls, from the initial state on."""

        def start(number: int) -> Run:
            return Run(self.module, functools.partial(watch, number))

        results = _run_calls(start, self.module, calls, self.state)
        pairs = zip(zip(*self.floats[: len(calls)], strict=True), zip(*results, strict=True), strict=True)
        return [_measure(_join(expected), _join(got)) for expected, got in pairs]


def _measure(expected: Any, got: Any) -> Difference:
    found = measure(expected, got, _TOLERANCE, 0.0, None)
    return dataclasses.replace(found, sqnr=-math.inf, cosine=math.nan) if found.problem else found


def _join(values: Sequence[Any]) -> Any:
    """Return the numbers of an output in several calls as one tensor."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return torch.cat([tensor.flatten() for tensor in tensors]) if tensors else values[0]


def _least(found: Sequence[Difference]) -> float:
    return min((each.sqnr for each in found), default=math.inf)
