"""What a lowering will do or did: the plan of each method, as text, JSON, Graphviz or an HTML page."""

from exir_lowering.public_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
