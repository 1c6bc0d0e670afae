"""A small vector machine: what a backend of exir-lowering needs, as a package of its own.

Nothing is imported here: a machine that only runs files imports `tinyvec.delegate`, and so no compiler.
"""
