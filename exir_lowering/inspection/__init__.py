"""Report what is in a file, without running any of it: `inspect` reads the tables, and returns a `FileReport`.

report: the values; reading: from a file to them; memory: planned memory over time; calls: instructions, and what flows
between them; text, page, graph: the views; difference: how two files differ; forms, releases, compatibility: `check`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
