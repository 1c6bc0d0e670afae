"""An extension of griffe: a function that hands its arguments on has the signature of the function that gets them."""

from __future__ import annotations

import re
from typing import Any

import griffe

GIVEN = re.compile(r"_with_arguments_of\((\w+)\)")
"""The decorator that does it at run time, in `exir_lowering/testing/api.py`."""


class Signatures(griffe.Extension):
    """Follows the decorator."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Give the functions their parameters."""
        module = pkg["testing.api"]
        for function in module.functions.values():
            for decorator in function.decorators:
                if found := GIVEN.fullmatch(str(decorator.value)):
                    function.parameters = module[found[1]].final_target.parameters
                    function.decorators.remove(decorator)
