"""A backend whose payload describes, as text, what it received: for tests, and for seeing what a backend gets."""

from exir_lowering.backends.echo.backend import EchoBackend

__all__ = ["EchoBackend"]
