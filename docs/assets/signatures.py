"""An extension of griffe: what a reader can pass to functions and classes."""

from __future__ import annotations

import re
from typing import Any

import griffe

GIVEN = re.compile(r"_with_arguments_of\((\w+)\)")
"""The decorator of `exir_lowering/testing/suite.py`: a function has the signature of the one that gets its arguments."""

PRIVATE = ("runtime.program.LoadedProgram", "verification.results.Culprit")
"""Public data classes with private fields; nobody makes them but this package."""


class Signatures(griffe.Extension):
    """Follows that decorator, and leaves out private fields of data classes and what only makes them printable."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Leave out a base that has nothing to call."""
        cls.bases = [base for base in cls.bases if str(base) != "Shown"]

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Mend the signatures of a package that was read."""
        module = pkg["testing.suite"]
        for function in module.functions.values():
            for decorator in function.decorators:
                if found := GIVEN.fullmatch(str(decorator.value)):
                    function.parameters = module[found[1]].parameters
                    function.decorators.remove(decorator)
        for name in PRIVATE:
            made = pkg[name].members["__init__"]
            made.parameters = griffe.Parameters(*[one for one in made.parameters if not one.name.startswith("_")])
