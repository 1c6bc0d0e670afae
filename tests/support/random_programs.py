"""Random programs in Edge dialect, and an interpreter that runs them as the ExecuTorch runtime does."""

from __future__ import annotations

import contextlib
import copy
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, to_edge
from executorch.exir.lowered_backend_module import LoweredBackendModule
from functorch.experimental.control_flow import map as torch_map
from torch import nn
from torch._higher_order_ops.scan import scan as torch_scan
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from exir_lowering.graphs import attribute, every_node, is_delegate_call

ORIGIN = "random_program_origin"
"""The key of node.meta under which each computing node of an input program has a number of its own."""

Step = tuple[Any, ...]
_HOPS = torch.ops.higher_order
_WIDTH = 4
_STATE = ("f0", "f1", "f2")


@dataclass(frozen=True)
class RandomProgram:
    """Methods in Edge dialect, and what the modules that they come from return in consecutive calls.

    Attributes:
        methods: The programs.
        inputs: For each method the inputs of each call.
        expected: For each method and call, the outputs of the module in eager PyTorch, then its inputs after the call.
        nested: Whether a method has a higher-order operator.
    """

    methods: dict[str, ExportedProgram]
    inputs: dict[str, list[tuple[Any, ...]]]
    expected: dict[str, list[list[Any]]]
    nested: bool


class Store(nn.Module):
    """The weights and the state that all methods share; every weight has a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.w0 = nn.Parameter(torch.randn(_WIDTH, _WIDTH) * 0.4)
        self.w1 = nn.Parameter(torch.randn(_WIDTH, _WIDTH) * 0.4)
        self.w2 = nn.Parameter(torch.randn(_WIDTH, 3 * _WIDTH) * 0.3)
        self.p0 = nn.Parameter(torch.randn(_WIDTH))
        self.p1 = nn.Parameter(torch.randn(_WIDTH))
        self.w0_tied, self.p0_tied = self.w0, self.p0
        self.register_buffer("c0", torch.randn(_WIDTH))
        self.register_buffer("c1", torch.randn(_WIDTH), persistent=False)
        self.register_buffer("c0_tied", self.c0)
        self.register_buffer("f0", torch.randn(_WIDTH))
        self.register_buffer("f1", torch.randn(_WIDTH), persistent=False)
        self.register_buffer("f2", torch.randn(_WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


class Method(nn.Module):
    """Runs a list of steps over a pool of values, each of shape (batch, 4), and returns what it is told to."""

    def __init__(self, store: Store, steps: Sequence[Step], results: Sequence[Step]) -> None:
        super().__init__()
        self.store, self.steps, self.results = store, list(steps), list(results)

    def forward(self, x: torch.Tensor, y: torch.Tensor, n: int) -> tuple[Any, ...]:
        pool, sizes = [x, y], [n]
        for name, *arguments in self.steps:
            _STEPS[name](self.store, pool, sizes, *arguments)
        return tuple(self._result(x, y, n, pool, sizes, *result) for result in self.results)

    def _result(self, x: Any, y: Any, n: Any, pool: list[Any], sizes: list[Any], kind: str, which: Any = None) -> Any:
        if kind == "value":
            return pool[which]
        if kind == "size":
            return sizes[which]
        if kind == "input":
            return {"x": x, "y": y, "n": n}[which]
        if kind == "stored":
            return getattr(self.store, which)
        return torch.tensor([1.0, 2.0]) if kind == "tensor" else which


# -- steps: each takes the store, the pool of values and the pool of sizes --------------------------------------------


def _unary(store: Store, pool: list[Any], sizes: list[Any], op: str, a: int) -> None:
    ops: dict[str, Callable[[Any], Any]] = {"relu": torch.relu, "sigmoid": torch.sigmoid, "neg": torch.neg}
    pool.append(ops[op](pool[a]))


def _binary(store: Store, pool: list[Any], sizes: list[Any], op: str, a: int, b: int) -> None:
    pool.append(pool[a] * torch.sigmoid(pool[b]) if op == "mul" else getattr(operator, op)(pool[a], pool[b]) * 0.7)


def _linear(store: Store, pool: list[Any], sizes: list[Any], weight: str, bias: str | None, a: int) -> None:
    bias_tensor = getattr(store, bias) if bias else None
    pool.append(nn.functional.linear(pool[a], getattr(store, weight), bias_tensor))


def _cat(store: Store, pool: list[Any], sizes: list[Any], a: int, b: int, c: int) -> None:
    pool.append(nn.functional.linear(torch.cat([pool[a], pool[b], pool[c]], dim=1), store.w2))


def _split(store: Store, pool: list[Any], sizes: list[Any], a: int, b: int, use_all: bool) -> None:
    pieces = torch.split(torch.cat([pool[a], pool[b]], dim=1), 2, dim=1)
    pool.append(torch.cat([pieces[3], pieces[0]], dim=1))
    if use_all:
        pool.append(torch.cat([pieces[1], pieces[2]], dim=1))


def _topk(store: Store, pool: list[Any], sizes: list[Any], a: int, use: str) -> None:
    values, indices = torch.topk(pool[a], 2, dim=1)
    parts = {"values": [values, values], "indices": [indices.float()] * 2, "both": [values, indices.float()]}[use]
    pool.append(torch.cat(parts, dim=1))


def _max(store: Store, pool: list[Any], sizes: list[Any], a: int, use: str) -> None:
    values, indices = pool[a].max(dim=1, keepdim=True)
    result = pool[a]
    if use != "indices":
        result = result - values
    if use != "values":
        result = result + indices * 0.1
    pool.append(result)


def _shuffle(store: Store, pool: list[Any], sizes: list[Any], a: int) -> None:
    batch = pool[a].shape[0]
    pool.append(pool[a].view(batch, 2, 2).permute(0, 2, 1).reshape(batch, _WIDTH))


def _sum(store: Store, pool: list[Any], sizes: list[Any], a: int) -> None:
    pool.append(pool[a] - pool[a].sum(dim=1, keepdim=True) * 0.2)


def _stored(store: Store, pool: list[Any], sizes: list[Any], name: str, a: int) -> None:
    pool.append(pool[a] * 0.5 + getattr(store, name))


def _lifted(store: Store, pool: list[Any], sizes: list[Any], a: int) -> None:
    pool.append(pool[a] + torch.tensor([0.1, 0.2, 0.3, 0.4]))


def _scale(store: Store, pool: list[Any], sizes: list[Any], a: int, size: int | None) -> None:
    pool.append(pool[a] * (pool[a].shape[0] if size is None else sizes[size]) * 0.2)


def _size(store: Store, pool: list[Any], sizes: list[Any], a: int) -> None:
    sizes.append(sizes[a] + pool[0].shape[0])


def _write(store: Store, pool: list[Any], sizes: list[Any], how: str, name: str, other: str, a: int) -> None:
    buffer, second = getattr(store, name), getattr(store, other)
    value = torch.sigmoid(pool[a].sum(dim=0))
    if how == "copy":
        buffer.copy_(value)
    elif how == "add":
        buffer.add_(value).mul_(0.5)
    elif how == "view":
        buffer.view(2, 2).mul_(0.5)
        buffer.view(2, 2)[0].add_(value[:2])
    elif how == "slice":
        buffer[1:3].copy_(value[:2])
    elif how == "both":
        buffer.copy_(value)
        second.copy_(value)
    elif how == "swap":
        kept = buffer.clone()
        buffer.copy_(second)
        second.copy_(kept)
    elif how == "from_buffer":
        buffer.copy_(second)
    elif how == "from_constant":
        buffer.copy_(store.p0)
    elif how == "returned":
        buffer.copy_(value)
        pool.append(pool[a] + value)
    elif how == "old":
        old = buffer.clone()
        buffer.mul_(0.5)
        pool.append(pool[a] - old)
    else:
        store.count.add_(1)


def _count(store: Store, pool: list[Any], sizes: list[Any], a: int) -> None:
    pool.append(pool[a] + store.count)


def _mutate_input(store: Store, pool: list[Any], sizes: list[Any], a: int) -> None:
    pool[0].add_(torch.sigmoid(pool[a]))


def _cond(store: Store, pool: list[Any], sizes: list[Any], a: int, weight: str, name: str) -> None:
    w, p = getattr(store, weight), getattr(store, name)

    def yes(v: torch.Tensor) -> torch.Tensor:
        return torch.relu(v @ w) + p

    def no(v: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(v) * p - v

    pool.append(torch.cond(pool[a].sum() > 0, yes, no, (pool[a],)))


def _conds(store: Store, pool: list[Any], sizes: list[Any], a: int, weight: str, name: str) -> None:
    """Two conditions in a row, the second of which reads what the first returned, with another one in it."""
    w, p = getattr(store, weight), getattr(store, name)

    def inner(v: torch.Tensor) -> torch.Tensor:
        return torch.cond(
            v.max() > 0.5, lambda u: torch.relu(u @ w), lambda u: u * p + torch.full((_WIDTH,), 0.5), (v,)
        )

    first, second = torch.cond(
        pool[a].sum() > 0, lambda v: (inner(v), v * p), lambda v: (torch.sigmoid(v), v @ w), (pool[a],)
    )
    third = torch.cond(first.sum() > second.sum(), lambda v, u: u - inner(v), lambda v, u: v @ w + u, (first, pool[a]))
    pool.append(first * 0.5 - second * 0.2 + torch.sigmoid(third))


def _map(store: Store, pool: list[Any], sizes: list[Any], a: int, weight: str, name: str) -> None:
    w, p = getattr(store, weight), getattr(store, name)

    def body(row: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(row @ w) * 0.5 + p

    pool.append(torch_map(body, pool[a]))


def _while(store: Store, pool: list[Any], sizes: list[Any], a: int, weight: str, name: str) -> None:
    w, p = getattr(store, weight), getattr(store, name)

    def go_on(i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return i < 2

    def body(i: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return i + 1, torch.sigmoid(v @ w) - p

    start = torch.zeros((), dtype=torch.int64)
    pool.append(torch.while_loop(go_on, body, (start, pool[a] * 1.0))[1])


def _scan(store: Store, pool: list[Any], sizes: list[Any], a: int, weight: str, name: str) -> None:
    w, p = getattr(store, weight), getattr(store, name)

    def step(carry: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        following = carry * 0.5 + torch.sigmoid(row @ w)
        return following, following - p

    carry, rows = torch_scan(step, torch.zeros(_WIDTH), pool[a])
    pool.append(rows + carry)


def _cond_in_map(store: Store, pool: list[Any], sizes: list[Any], a: int, weight: str, name: str) -> None:
    w, p = getattr(store, weight), getattr(store, name)

    def yes(v: torch.Tensor) -> torch.Tensor:
        return torch.relu(v * p) + p

    def no(v: torch.Tensor) -> torch.Tensor:
        return v @ w

    def body(row: torch.Tensor) -> torch.Tensor:
        return torch.cond(row.sum() > 0, yes, no, (row * 0.5,)) - p

    pool.append(torch_map(body, pool[a]))


_STEPS: dict[str, Callable[..., None]] = {
    "unary": _unary,
    "binary": _binary,
    "linear": _linear,
    "cat": _cat,
    "split": _split,
    "topk": _topk,
    "max": _max,
    "shuffle": _shuffle,
    "sum": _sum,
    "stored": _stored,
    "lifted": _lifted,
    "scale": _scale,
    "size": _size,
    "write": _write,
    "count": _count,
    "mutate_input": _mutate_input,
    "cond": _cond,
    "conds": _conds,
    "map": _map,
    "while": _while,
    "scan": _scan,
    "cond_in_map": _cond_in_map,
}
_NESTED = ("cond", "conds", "map", "while", "scan", "cond_in_map")
_WRITES = (
    "copy",
    "add",
    "view",
    "slice",
    "both",
    "swap",
    "from_buffer",
    "from_constant",
    "returned",
    "old",
    "count",
)


# -- making programs --------------------------------------------------------------------------------------------------


class NotExportable(Exception):
    """torch cannot export a module: some values that are written and returned too, some operands of bodies."""


def random_programs(seed: int, count: int) -> list[RandomProgram]:
    """Make programs from consecutive seeds, without those that torch cannot export; most it can."""
    programs: list[RandomProgram] = []
    for candidate in range(seed, seed + 2 * count):
        with contextlib.suppress(NotExportable):
            programs.append(random_program(candidate))
        if len(programs) == count:
            return programs
    raise NotExportable(f"torch exports {len(programs)} of {2 * count} random modules only")


def random_program(seed: int) -> RandomProgram:
    """Make the program of a seed; one in four has higher-order operators."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    nested = seed % 4 == 3
    store = Store()
    methods: dict[str, ExportedProgram] = {}
    inputs: dict[str, list[tuple[Any, ...]]] = {}
    expected: dict[str, list[list[Any]]] = {}
    for name in ("forward", "second", "third")[: 1 if nested else rng.choice([1, 1, 2, 3])]:
        steps, results = _recipe(rng, nested)
        dynamic = not nested and rng.random() < 0.6
        batches, sizes = ((3, 2, 5), (3, 4, 2)) if dynamic else ((3, 3, 3), (3, 3, 3))
        inputs[name] = [
            (torch.randn(batch, _WIDTH), torch.randn(batch, _WIDTH), size)
            for batch, size in zip(batches, sizes, strict=True)
        ]
        eager = Method(copy.deepcopy(store), steps, results).eval()
        expected[name] = [_call(eager, arguments) for arguments in inputs[name]]
        batch_dim = torch.export.Dim("batch", min=2, max=8)
        shapes = ({0: batch_dim}, {0: batch_dim}, torch.export.Dim.DYNAMIC) if dynamic else None
        example = copy.deepcopy(inputs[name][0])
        methods[name] = _edge(Method(store, steps, results), example, shapes)
        _number(methods[name])
    return RandomProgram(methods, inputs, expected, nested)


def _edge(module: nn.Module, example: tuple[Any, ...], shapes: Any) -> ExportedProgram:
    try:
        exported = torch.export.export(module.eval(), example, dynamic_shapes=shapes)
        return to_edge(exported, compile_config=EdgeCompileConfig(_check_ir_validity=False)).exported_program()
    except Exception as error:  # torch raises what it likes
        raise NotExportable(str(error)) from error


def _call(module: nn.Module, arguments: tuple[Any, ...]) -> list[Any]:
    arguments = copy.deepcopy(arguments)
    with torch.no_grad():
        outputs = module(*arguments)
    return copy.deepcopy([*pytree.tree_leaves(outputs, is_leaf=lambda leaf: leaf is None), *arguments])


def _number(program: ExportedProgram) -> None:
    number = 0
    for _, node in every_node(program.graph_module):
        if node.op == "call_function":
            node.meta[ORIGIN] = number
            number += 1


def random_method(seed: int, most: int, nested: Sequence[str] = ()) -> Method:
    """Make the module of a seed, with state of its own.

    Args:
        seed: The seed.
        most: How many steps it has at most.
        nested: The higher-order operators that it may have; it has one at least.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    return Method(Store(), *_recipe(rng, bool(nested), most, nested)).eval()


def _recipe(
    rng: random.Random, nested: bool, most: int | None = None, operators: Sequence[str] = _NESTED
) -> tuple[list[Step], list[Step]]:
    steps: list[Step] = []
    pool, sizes = 2, 1
    state_heavy = rng.random() < 0.5
    for _ in range(rng.randint(3, most or (6 if nested else 12))):
        name = rng.choice([key for key in _STEPS if key not in (*_NESTED, "mutate_input", "write")])
        if state_heavy and rng.random() < 0.5:
            name = "write"
        if nested and rng.random() < 0.35:
            name = rng.choice(operators)
        if not nested and rng.random() < 0.04:
            name = "mutate_input"
        step = (name, *_arguments(rng, name, pool, sizes))
        steps.append(step)
        if name == "size":
            sizes += 1
        elif name == "write":
            pool += step[1] in ("returned", "old")
        elif name == "split":
            pool += 1 + step[3]
        elif name != "mutate_input":
            pool += 1
    if nested and not any(step[0] in _NESTED for step in steps):
        name = rng.choice(operators)
        steps.append((name, *_arguments(rng, name, pool, sizes)))
        pool += 1
    results: list[Step] = [("value", pool - 1)]
    choices: list[Step] = [
        ("value", pool - 1),
        ("value", rng.randrange(pool)),
        ("value", rng.randrange(pool)),
        ("value", rng.randrange(pool)),
        ("size", rng.randrange(sizes)),
        ("input", rng.choice("xyn")),
        ("stored", rng.choice(_STATE)),
        ("stored", rng.choice(["p0", "w1", "c1", "c0_tied"])),
        ("tensor",),
        ("literal", 7),
        ("literal", None),
    ]
    results += [rng.choice(choices) for _ in range(rng.randint(0, 4))]
    rng.shuffle(results)
    return steps, results


def _arguments(rng: random.Random, name: str, pool: int, sizes: int) -> Step:
    def value() -> int:
        return pool - 1 - min(int(rng.expovariate(0.5)), pool - 1)

    weight = rng.choice(["w0", "w0_tied", "w1"])
    vector = rng.choice(["p0", "p0_tied", "p1", "c0", "c0_tied", "c1", *_STATE])
    if name == "unary":
        return rng.choice(["relu", "sigmoid", "neg"]), value()
    if name == "binary":
        return rng.choice(["add", "sub", "mul"]), value(), value()
    if name == "linear":
        return weight, rng.choice([None, "p0", "p1"]), value()
    if name == "cat":
        return value(), value(), value()
    if name == "split":
        return value(), value(), rng.random() < 0.7
    if name in ("topk", "max"):
        return value(), rng.choice(["values", "indices", "both"])
    if name == "stored":
        return vector, value()
    if name == "scale":
        return value(), rng.choice([None, rng.randrange(sizes)])
    if name == "size":
        return (rng.randrange(sizes),)
    if name == "write":
        first = rng.choice(_STATE)
        return rng.choice(_WRITES), first, rng.choice([state for state in _STATE if state != first]), value()
    if name in _NESTED:
        return value(), weight, vector
    return (value(),)


# -- running programs -------------------------------------------------------------------------------------------------


@dataclass
class Interpreter:
    """Runs a program as the ExecuTorch runtime does.

    Each delegate has memory of its own, and what a program writes to its state takes effect after the call.
    Higher-order operators are Python loops: in eager PyTorch they trace their graphs again, which fails for graphs with
    delegates in them.
    """

    program: ExportedProgram
    state: dict[str, Any] = field(default_factory=dict)
    delegates: dict[int, Interpreter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        clones: dict[int, Any] = {}
        for spec in self.program.graph_signature.input_specs:
            if spec.kind is not InputKind.USER_INPUT:
                target = str(spec.target)
                tables = (self.program.state_dict, self.program.constants)
                tensor = next(table[target] for table in tables if target in table)
                self.state[target] = clones.setdefault(id(tensor), tensor.detach().clone())

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run one call; inputs that the program mutates are changed."""
        signature = self.program.graph_signature
        following = iter(inputs)
        arguments = {
            str(spec.arg.name): next(following) if spec.kind is InputKind.USER_INPUT else self.state[str(spec.target)]
            for spec in signature.input_specs
        }
        with torch.no_grad():
            values = self._run(self.program.graph_module, list(arguments.values()))
        values = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
        outputs = []
        for value, spec in zip(values, signature.output_specs, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                outputs.append(value)
            elif spec.kind is OutputKind.BUFFER_MUTATION:
                self.state[str(spec.target)].copy_(value)
            else:
                arguments[str(spec.target)].copy_(value)
        return outputs

    def _run(self, module: GraphModule, arguments: Sequence[Any]) -> Any:
        env: dict[Node, Any] = {}
        given = iter(arguments)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "get_attr":
                env[node] = attribute(module, str(node.target))
            elif node.op == "output":
                if next(given, self) is not self:
                    raise ValueError(f"{len(arguments)} arguments are too many for the graph")
                return torch.fx.map_arg(node.args[0], env.__getitem__)
            else:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = self._node(node, args, kwargs)
        raise ValueError("the graph has no output")

    def _node(self, node: Node, args: Any, kwargs: Any) -> Any:
        if is_delegate_call(node):
            delegate: LoweredBackendModule = args[0]
            known = self.delegates.setdefault(id(delegate), Interpreter(delegate.original_module))
            return known(*args[1:])
        if node.target is _HOPS.cond:
            return self._run(args[1] if args[0] else args[2], args[3])
        if node.target is _HOPS.map_impl:
            rows = [self._run(args[0], [*(x[i] for x in args[1]), *args[2]]) for i in range(len(args[1][0]))]
            return [torch.stack(list(column)) for column in zip(*rows, strict=True)]
        if node.target is _HOPS.scan:
            carry, collected = list(args[1]), []
            for i in range(len(args[2][0])):
                results = self._run(args[0], [*carry, *(x[i] for x in args[2]), *args[3]])
                carry = list(results[: len(carry)])
                collected.append(results[len(carry) :])
            return [*carry, *(torch.stack(list(column)) for column in zip(*collected, strict=True))]
        if node.target is _HOPS.while_loop:
            carried = list(args[2])
            while _scalar(self._run(args[0], [*carried, *args[3]])):
                carried = list(self._run(args[1], [*carried, *args[3]]))
            return carried
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _scalar(result: Any) -> bool:
    return bool(result[0] if isinstance(result, (list, tuple)) else result)
