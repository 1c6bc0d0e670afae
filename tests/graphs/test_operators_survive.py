"""Operators that a file may have executed, called with wrong arguments of every kind: an exception, or a result.

`EXIR_LOWERING_EXAMPLES=200` tries each operator as often; here twice.
"""

from __future__ import annotations

import faulthandler
import os
import random
import resource
import signal
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

from exir_lowering import graphs
from exir_lowering._upstream.operators import Argument
from exir_lowering.graphs.operators import checks as operator_checks, pure as pure_operators
from exir_lowering.graphs.operators.calls import CheckedCall

EXAMPLES = int(os.environ.get("EXIR_LOWERING_EXAMPLES", "2"))
BATCH, SECONDS, MEMORY = 50, 5, 2 << 30
DTYPES = [
    *[torch.float32] * 3, *[torch.int64] * 2, torch.int32, torch.bool, torch.int8, torch.uint8, torch.float16,
    torch.complex64,
]  # fmt: skip
SHAPES = [
    (),
    (0,),
    (1,),
    (3,),
    (4,),
    (2, 3),
    (4, 4),
    (1, 4),
    (2, 3, 4),
    (1, 1, 4, 4),
    (2, 4, 3, 3),
    (1, 2, 4, 4, 4),
    (0, 4),
]
NUMBERS = [0, 1, 2, 3, -1, -2, 4, 5, 7, 8]
EXTREMES = [-7, 100, 10**5, 2**31 - 1, -(2**31), 2**31, 2**40, 2**62, -(2**63), 2**63 - 1]
FLOATS = [0.0, 1.0, 0.5, -1.0, 1e-38, 1e38, float("nan"), float("inf"), -float("inf"), 3.0]
WORDS = ["mean", "sum", "trunc", "floor", "tanh", "same", "reflect", "circular", "ij,jk->ik", "left", "fro", "amax"]


def names() -> list[str]:
    return [name for name in sorted(graphs.known_operators()) if _fits(name)]


def _fits(name: str) -> bool:
    return name.startswith(("aten.", "quantized_decomposed.")) and pure_operators.find(name) is not None


def integer(rng: random.Random) -> int:
    return rng.choice(NUMBERS if rng.random() < 0.8 else EXTREMES)


def tensor(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor, mostly of the shape and type that the others have."""
    shape = shape if rng.random() < 0.7 else rng.choice(SHAPES)
    dtype = dtype if rng.random() < 0.7 else rng.choice(DTYPES)
    if dtype.is_floating_point or dtype.is_complex:
        made = torch.randn(shape).to(dtype)
    elif dtype is torch.bool:
        made = torch.rand(shape) > 0.5
    else:
        known = torch.iinfo(dtype)
        made = torch.randint(max(-1, known.min), 6, shape).to(dtype)
        if rng.random() < 0.3:
            made = torch.full(shape, max(known.min, min(known.max, integer(rng))), dtype=dtype)
    if made.dim() > 1 and rng.random() < 0.1:
        made = made.transpose(0, 1)
    return made


def value(rng: random.Random, argument: Argument, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Make a value of an argument's type."""
    kind = argument.type
    if kind.startswith("Optional["):
        if rng.random() < 0.5:
            return None
        kind = kind[len("Optional[") : -1]
    if kind.startswith("List["):
        item = Argument(argument.name, kind[len("List[") : -1], False, False, False)
        return [value(rng, item, shape, dtype) for _ in range(rng.choice([1, 2, 2, 3, 4, 0]))]
    made: dict[str, Any] = {
        "Tensor": lambda: tensor(rng, shape, dtype),
        "number": lambda: rng.choice([integer(rng), rng.choice(FLOATS), True]),
        "int": lambda: rng.choice(DTYPES) if "dtype" in argument.name else integer(rng),
        "float": lambda: rng.choice(FLOATS),
        "bool": lambda: rng.random() < 0.5,
        "str": lambda: rng.choice(WORDS),
        "Device": lambda: torch.device("cpu"),
        "Generator": lambda: None,
    }
    return made[kind]()


def attempt(name: str, seed: int) -> None:
    """Call an operator with arguments that a seed makes."""
    operator = pure_operators.find(name)
    if operator is None:
        raise AssertionError(name)
    rng = random.Random(f"{name} {seed}")
    torch.manual_seed(seed)
    shape, dtype = rng.choice(SHAPES), rng.choice(DTYPES)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in operator.arguments:
        if not argument.keyword:
            args.append(value(rng, argument, shape, dtype))
        elif argument.name not in ("layout", "pin_memory", "memory_format") and rng.random() < 0.6:
            kwargs[argument.name] = value(rng, argument, shape, dtype)
    call = CheckedCall(name.split(".")[1], operator)
    call.needs(args, kwargs)
    result = call(*args, **kwargs)
    for each in result if isinstance(result, (list, tuple)) else [result]:
        if isinstance(each, torch.Tensor) and each.numel() < 10**6:
            each.clone()  # reads it all


def deaths(operators: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Call operators in a child; return what ended it, going on after that in another one."""
    with tempfile.TemporaryFile() as place:
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                _child(operators, seeds, place.fileno())
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        where = os.pread(place.fileno(), 200, 0).decode().split()
    if code == 0:
        return []
    number, seed = operators.index(where[0]), int(where[1])
    # What takes long, or all memory that it may have, was stopped by the test.
    found = [] if -code == signal.SIGALRM else [f"{where[0]} with seed {seed}: signal {-code}"]
    later = [one for one in seeds if one > seed]
    return found + (deaths(operators[number : number + 1], later) if later else []) + _rest(operators, number, seeds)


def _rest(operators: Sequence[str], number: int, seeds: Sequence[int]) -> list[str]:
    return deaths(operators[number + 1 :], seeds) if operators[number + 1 :] else []


def _child(operators: Sequence[str], seeds: Sequence[int], place: int) -> None:
    torch.set_num_threads(1)  # threads do not survive a fork
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm", encoding="ascii") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for name in operators:
        for seed in seeds:
            os.pwrite(place, f"{name} {seed}".encode().ljust(200), 0)
            signal.alarm(SECONDS)
            with suppress(Exception):
                attempt(name, seed)


def test_no_operator_ends_the_process() -> None:
    found = names()
    assert len(found) > 700
    seeds = range(EXAMPLES)
    assert not [death for first in range(0, len(found), BATCH) for death in deaths(found[first : first + BATCH], seeds)]


def test_it_notices_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that are checked, called without."""
    monkeypatch.setattr(operator_checks, "CHECKS", {})
    assert any("_fft_" in death for death in deaths(["aten._fft_c2c.default", "aten._fft_r2c.default"], range(80)))
