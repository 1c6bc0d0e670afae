"""Programs in int8, by the flow that ExecuTorch and torchao have for it, and how far each layer is from float.

`recipes` says how; `layers` finds what was quantised, and puts a layer back into float to see what it costs;
`exporting` makes a program again; `results` says what came out; `quantizing` has `quantize`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
