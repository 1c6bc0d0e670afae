"""Put new weights into a lowered file without lowering again: `refit`.

refit: the call and its result; values: what it is given, checked; content: where the new bytes go.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
