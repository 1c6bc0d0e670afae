"""Report what is in a file, without running any of it: `inspect` reads the tables, and returns a `FileReport`.

report: the values; reading: from a file to them; memory: planned memory over time; text: the view; compatibility:
`check`.
"""

from exir_lowering.public_names import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, __file__)
