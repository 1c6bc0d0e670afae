"""A backend of exir-lowering.

Nothing is imported here: a machine that only runs files imports `tinyvec.delegate`, and so no compiler.
"""

MAGIC, VERSION = b"TINYVEC", 1
"""What each payload starts with. Change the version when opcodes or their arguments change."""
