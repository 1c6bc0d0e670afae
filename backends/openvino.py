"""ExecuTorch's OpenVINO backend under one name. It needs an extra: `pip install "exir-lowering[openvino]"`."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from exir_lowering import CompileSpec, ExplainedResult, InputError, Partitioner, PluginLoadError, Rejection, graphs
from exir_lowering.graphs import measures
from exir_lowering.partitioners.algorithms import nested_run
from exir_lowering.plugins import conversion_lock

INSTALL = 'pip install "exir-lowering[openvino]"'

if find_spec("openvino") is None:
    raise ImportError(f"The backend 'openvino' needs OpenVINO, which is not installed: {INSTALL}.", name="openvino")

_ARITHMETIC = frozenset(
    {"add", "amax", "amin", "clamp", "cumsum", "div", "max", "maximum", "mean", "min", "minimum", "mul", "prod", "sub",
     "sum", "where"}
)  # fmt: skip
"""Operators, by name without overload, that OpenVINO does not support for bools."""

_REASONS = {
    "dynamic_shape": "its result has a dynamic size, and ExecuTorch's OpenVINO delegate returns results of the largest "
    "size",
    "empty": "one of its tensors has no elements, which ExecuTorch's OpenVINO delegate refuses",
    "rank": "a tensor without dimensions would enter or leave the partition, which ExecuTorch's OpenVINO delegate "
    "refuses",
    "dtype": "it computes with bools, which OpenVINO does not support",
}

_PACKAGE = "executorch.backends.openvino"


def openvino(device: str = "CPU") -> Partitioner:
    """Return a partitioner that gives OpenVINO what ExecuTorch's `OpenvinoPartitioner` takes.

    Operators whose results have dynamic sizes stay on the host: ExecuTorch's OpenVINO delegate returns results with
    the upper bounds of their sizes. So do operators with empty tensors, arithmetic on bools, and operators that would
    pass a tensor without dimensions, other than a constant, into or out of a partition: OpenVINO or the delegate
    refuses these. To exclude others, use `deny` of `exir_lowering.partitioners`.

    Programs of ExecuTorch's `OpenVINOQuantizer` (PT2E int8) need no option if they were made with
    `convert_pt2e(..., fold_quantize=False)`.

    The device chooses its precision when a file is loaded: CPUs with bfloat16 instructions use them for float32 models,
    which gives two to three correct digits.

    Args:
        device: Where OpenVINO runs the file: one of `openvino.Core().available_devices`. It must also be present when
            the model is lowered.

    Raises:
        InputError: OpenVINO does not have the device on this machine.
        PluginLoadError: The installed OpenVINO does not work with ExecuTorch.
    """
    return OpenvinoPartitioner(device)


class OpenvinoPartitioner(Partitioner):  # type: ignore[misc]
    """ExecuTorch's `OpenvinoPartitioner` without what its delegate would get wrong. Arguments as for `openvino`."""

    def __init__(self, device: str = "CPU") -> None:
        super().__init__()
        if not isinstance(device, str) or not device:
            raise InputError(f'openvino(device={device!r}): expected the name of a device, such as "CPU".')
        import openvino as library

        available = library.Core().available_devices
        if device not in available:
            raise InputError(
                f"openvino(device={device!r}): OpenVINO has no such device here, only "
                f"{', '.join(available) or 'none'}. It compiles only for a device that is present: install its driver, "
                "or name another one."
            )
        self.partitioner: Partitioner = _upstream_class()([CompileSpec("device", device.encode())])

    def partition(self, exported_program: ExportedProgram) -> ExplainedResult:
        """Tag the operators that OpenVINO takes; PartitionerContractError if ExecuTorch's partitioner raises."""
        held = {
            node: code
            for _, node in graphs.every_node(exported_program.graph_module)
            if graphs.is_operator(node) and (code := _refused(node))
        }
        mutated = graphs.written_state(exported_program)
        lifted = graphs.lifted_inputs(exported_program)
        constants = {node for node, spec in lifted.items() if spec.target not in mutated}  # which partitions own
        while True:
            run = nested_run.run(self.partitioner, exported_program, held)
            crossing = _crossing(exported_program.graph_module, run.tags, constants) - held.keys()
            if not crossing:
                break
            held.update(dict.fromkeys(crossing, "rank"))
        own = tuple(
            Rejection("", name, graphs.operator_name(node), _REASONS[held[node]], "openvino", held[node])
            for path, node in graphs.every_node(exported_program.graph_module)
            if node in held and (name := graphs.qualified_name(path, node))
        )
        rejections = (*run.rejections, *own)
        return nested_run.tagged(exported_program, run.tags, run.destinations, rejections, run.adjustments)

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], Callable[[Node], bool] | None]:
        """Ask ExecuTorch's partitioner, except about what stays on the host."""
        # Where partitions end is not known yet: any tensor without dimensions may cross a boundary.
        return nested_run.ask_preserved(
            [self.partitioner],
            ep,
            lambda number, node: not _refused(node) and not any(map(_scalar, (node, *node.all_input_nodes))),
        )


def _refused(node: Node) -> str:
    """Return the code of the reason why a node must stay on the host wherever partitions end, "" if there is none."""
    value = node.meta.get("val")
    results = list(measures.tensors(value))
    sizes = [size for tensor in results for size in tensor.shape]
    if isinstance(value, measures.SYMBOLS) or not all(isinstance(s, int) for s in sizes):
        return "dynamic_shape"
    given = [tensor for source in node.all_input_nodes for tensor in measures.tensors(source.meta.get("val"))]
    # Some of several results may be unused, such as the empty statistics of a batch norm.
    used = list(results) if isinstance(value, torch.Tensor) else []
    used += [tensor for user in filter(graphs.is_getitem, node.users) for tensor in measures.tensors(user.meta["val"])]
    if any(size == 0 for tensor in (*used, *given) for size in tensor.shape if isinstance(size, int)):
        return "empty"
    base = f"{graphs.operator_name(node)}.".split(".")[1]
    computed = results if base == "where" else given  # its condition is a bool, whatever it selects
    if base in _ARITHMETIC and computed and all(tensor.dtype == torch.bool for tensor in computed):
        return "dtype"
    return ""


def _scalar(node: Node) -> bool:
    """Return whether a node's result, or a part of it, is a tensor without dimensions."""
    return any(tensor.dim() == 0 for tensor in measures.tensors(node.meta.get("val")))


def _crossing(module: GraphModule, tags: Mapping[Node, str], constants: Collection[Node]) -> set[Node]:
    """Return operators that pass tensors without dimensions into or out of a partition, and those linked to them."""

    def operator(node: Node) -> Node:
        return operator(node.all_input_nodes[0]) if graphs.is_getitem(node) else node

    neighbours: dict[Node, set[Node]] = {}
    found: list[Node] = []
    for node in module.graph.nodes:
        if not _scalar(node) or node in constants:
            continue
        source = operator(node)
        for user in map(operator, (user for user in node.users if not graphs.is_getitem(user))):
            # The tensor must be made and read in one partition: if one end stays on the host, the other must too.
            neighbours.setdefault(source, set()).add(user)
            neighbours.setdefault(user, set()).add(source)
            if tags.get(source) != tags.get(user):
                found += [source, user]
    crossing: set[Node] = set()
    while found:
        node = found.pop()
        if node not in crossing and graphs.is_operator(node):
            crossing.add(node)
            found += neighbours.get(node, ())
    return crossing


def _upstream_class() -> Any:
    """Return ExecuTorch's class."""
    # Its package also imports the quantizer, which needs nncf: meanwhile, an empty module stands in for the package.
    with conversion_lock():
        stand_in = None
        if _PACKAGE not in sys.modules:
            found = find_spec(_PACKAGE)
            stand_in = ModuleType(_PACKAGE)
            stand_in.__path__ = list((found.submodule_search_locations if found is not None else None) or ())
            sys.modules[_PACKAGE] = stand_in
        try:
            module: Any = importlib.import_module(f"{_PACKAGE}.partitioner")
        except MemoryError:
            raise
        except Exception as error:
            raise PluginLoadError(
                f"The backend 'openvino': importing ExecuTorch's partitioner raised {type(error).__name__}: {error}. "
                f"openvino {version('openvino')} is installed; expected one that executorch {version('executorch')} "
                f"works with: {INSTALL}."
            ) from error
        finally:
            if stand_in is not None:
                del sys.modules[_PACKAGE]
    log = logging.getLogger(module.__name__)
    # It prints the operators that it leaves on the host. Stdout may be a command's JSON, and the report has them too.
    module.print = lambda *words: log.debug(" ".join(map(str, words)))
    return module.OpenvinoPartitioner
