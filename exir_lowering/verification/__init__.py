"""Whether a file computes what its programs do: the runtime against eager PyTorch, on inputs that find errors.

`subjects` says what is compared, `sizes`, `positions` and `cases` make inputs, `eager` runs the programs, `measure`
compares, `local_errors` finds where an error arises, `results` says what was found; `checking` has `verify`.
`bisecting` has `bisect`: `culprit` is what it finds, `repro` what it saves of that.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
