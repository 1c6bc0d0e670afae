"""The graph kit: how the compiler, partitioners and backends walk, copy, order and measure graphs."""

from exir_lowering.public_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
