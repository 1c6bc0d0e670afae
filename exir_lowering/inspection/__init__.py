"""Report what is in a file, without running any of it: `inspect` reads the tables, and returns a `FileReport`.

report: the values; reading: from a file to them; memory: planned memory over time; text: the view; difference: how
two files differ; compatibility: `check`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
