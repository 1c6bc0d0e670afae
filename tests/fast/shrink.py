"""Makes a program smaller that the two conversions disagree about."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument

from exir_lowering import graphs


def shrink(program: ExportedProgram, fails: Callable[[ExportedProgram], bool]) -> ExportedProgram:
    """Leave out calls, and outputs in favour of an input, as long as the program fails."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(program):
            try:
                smaller = fails(candidate)
            except Exception:
                continue
            if smaller:
                program = candidate
                break
    return program


def _candidates(program: ExportedProgram) -> Iterator[ExportedProgram]:
    outputs = [i for i, spec in enumerate(program.graph_signature.output_specs) if spec.kind is OutputKind.USER_OUTPUT]
    given = [s.arg.name for s in program.graph_signature.input_specs if s.kind is InputKind.USER_INPUT if s.arg.name]
    for index in outputs if given else ():
        taken = program.graph.output_node().args[0][index]
        if getattr(taken, "op", None) == "call_function":
            yield _with_output(program, index, given[0])
    dead = [node.name for node in program.graph.nodes if node.op == "call_function" and not node.users]
    if len(dead) > 3:
        yield _without(program, dead)
    for name in reversed(dead):
        yield _without(program, [name])


def _with_output(program: ExportedProgram, index: int, name: str) -> ExportedProgram:
    made = graphs.copy_program(program)
    node = next(node for node in made.graph.nodes if node.name == name)
    output = made.graph.output_node()
    values = list(output.args[0])
    values[index] = node
    output.args = (tuple(values),)
    specs = copy.copy(made.graph_signature.output_specs)
    specs[index] = OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=name), None)
    made.graph_signature.output_specs = specs
    return made


def _without(program: ExportedProgram, names: list[str]) -> ExportedProgram:
    made = graphs.copy_program(program)
    for node in reversed(made.graph.nodes):
        if node.name in names and not node.users:
            made.graph.erase_node(node)
    return made
