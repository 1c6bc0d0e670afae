"""A method of a lowered module."""

from __future__ import annotations

from typing import Any

from exir_lowering.lowered_module.convention import Convention
from exir_lowering.lowered_module.runners import Runner


class LoweredMethod:
    """A method of a `LoweredModule`, called as the original was."""

    def __init__(self, runner: Runner, convention: Convention) -> None:
        self._runner, self._convention = runner, convention
        self.__name__ = self.__qualname__ = convention.method
        self.__signature__ = convention.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute the method.

        Args:
            args: The arguments that are given by position.
            kwargs: The arguments that are given by name. One that was fixed at export may be left out.

        Returns:
            What the original returns. Tensors belong to the caller. What the original writes into its arguments is
            written into those that were given.

        Raises:
            InputError: An argument is missing, surplus or not what the method takes, or the runtime failed.
            BackendUnavailableError: The method needs a backend that this machine does not have.
            BackendFailure: A delegate raised.
            BackendContractError: What a delegate returned is not what the program says.
            InvariantError: What the runtime returned is not what the program says.
        """
        leaves = self._convention.bind(args, kwargs)
        outputs = self._runner.run(self._convention, leaves)
        self._convention.write_back(leaves, outputs)
        return self._convention.restore(outputs)

    def __repr__(self) -> str:
        return f"<lowered method {self._convention}>"
