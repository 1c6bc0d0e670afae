"""How long torch takes to evaluate the symbolic sizes of a file, measured before it does."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from exir_lowering._upstream.exported_files import evaluate_size
from exir_lowering.errors.interrupts import let_through
from exir_lowering.graphs.serialized.grammar import ExcessiveFileError, show

STEPS, STEPS_OF_CHARACTER = 3_000_000, 200
"""How many calls of functions sympy may need for all sizes of a file, and for each of their characters beside."""


def check_evaluation(sizes: Mapping[str, int]) -> None:
    """Check that checked symbolic expressions are evaluated in bounded time; each is in a file so many times.

    A short expression can have sympy multiply out millions of terms, and no simple rule says which does. So each is
    evaluated here, up to a number of function calls, which is the same on every machine.

    It is done in a separate thread: the caller may have a profiler, which Python may not be able to put back. Raises
    ExcessiveFileError for the expression that takes what a file is allowed.
    """
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_check_evaluation, sizes).result()


def _check_evaluation(sizes: Mapping[str, int]) -> None:
    allowed = STEPS + STEPS_OF_CHARACTER * sum(len(text) * count for text, count in sizes.items())
    left = allowed
    for text, count in sizes.items():
        left -= _count_steps(text, left)
        if left > 0 and count > 1:
            left -= (count - 1) * _count_steps(text, left)  # sympy remembers a part
        if left <= 0:
            raise ExcessiveFileError(
                f"the symbolic expression {show(text)} is refused: with it, evaluating the file's sizes takes more "
                f"than {allowed} steps, the limit for a file of this size"
            )


class _OutOfStepsError(BaseException):
    """Ends an evaluation; sympy handles what is an Exception."""


def _count_steps(text: str, most: int) -> int:
    """Return how many functions are called when a size is evaluated, `most` if that is not the end of it."""
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps >= most:
            raise _OutOfStepsError

    try:
        sys.setprofile(count)
        evaluate_size(text)
    except _OutOfStepsError:
        return most
    except Exception as error:  # torch will say what is wrong with it
        let_through(error)
    finally:
        sys.setprofile(None)
    return steps
