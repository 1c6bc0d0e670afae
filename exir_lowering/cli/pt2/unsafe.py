"""The errors for a file that would run code, or take memory or time without bounds."""

from exir_lowering.errors import InputError


class UnsafeFileError(InputError):
    """Something in a `.pt2` file would or could run code when torch loads it; the message says what, as a clause."""


class ExcessiveFileError(UnsafeFileError):
    """A `.pt2` file would take much more memory or time than its size says; the message says what, as a clause."""
