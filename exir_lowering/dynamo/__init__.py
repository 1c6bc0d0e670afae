"""torch.compile with this project's partitioners, backends and delegates."""

from importlib import import_module

from exir_lowering._upstream.dynamo import register_backend, registered_backends
from exir_lowering.public_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)

# torch finds the backend as an entry point of the group torch_dynamo_backends, and loads it when it is asked for. A
# source tree on PYTHONPATH that is not installed has no entry points: there, it is registered here.
if "exir_lowering" not in registered_backends():
    register_backend(import_module("exir_lowering.dynamo.compiler").backend, name="exir_lowering")
