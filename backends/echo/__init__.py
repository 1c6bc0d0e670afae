"""A backend whose payload describes, as text, what it received: for tests, and to see what a backend would get."""

from exir_lowering.backends.echo.backend import EchoBackend

__all__ = ["EchoBackend"]
