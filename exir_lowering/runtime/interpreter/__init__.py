"""The engine in Python: a program's instructions, one after the other, in PyTorch."""
