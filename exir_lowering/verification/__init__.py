"""Whether a file computes what its programs do: the runtime against eager PyTorch, on inputs that find errors.

`subjects` says what is compared, `sizes` and `cases` make inputs, `eager` runs the programs, `measure` compares,
`checking` has `verify`, `bisecting` has `bisect`. `results` has what both find.
"""

from exir_lowering.public_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
