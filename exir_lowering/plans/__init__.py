"""What a lowering will do or did: the plan of each method, as text, JSON, Graphviz or an HTML page."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
