"""The error for a file that would run code."""

from exir_lowering.errors import InputError


class UnsafeFileError(InputError):
    """Something in a `.pt2` file would or could run code when torch loads it; the message says what, as a clause."""
