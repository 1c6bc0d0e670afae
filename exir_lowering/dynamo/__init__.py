"""torch.compile with this project's partitioners, backends and delegates."""

from importlib import import_module

import lazy_loader

from exir_lowering._upstream.dynamo import register_backend, registered_backends

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

NAMES = {
    "exir_lowering": ("exir_lowering.dynamo.compiler", "backend"),
    "exir_lowering_debug": ("exir_lowering.dynamo.debugging", "debug_backend"),
}
"""The names under which torch.compile knows this package's backends, each with its module and function.

torch finds them as entry points of the group torch_dynamo_backends, and loads them when they are asked for. A source
tree on PYTHONPATH that is not installed has no entry points: there, they are registered here.
"""

for _name, (_module, _function) in NAMES.items():
    if _name not in registered_backends():
        register_backend(getattr(import_module(_module), _function), name=_name)
