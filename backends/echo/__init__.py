"""A backend whose payload says, as text, what it was given: for tests, and to see what a real backend would get."""

from exir_lowering.backends.echo.backend import EchoBackend

__all__ = ["EchoBackend"]
