"""Operators: their names, and which of them a file may have executed, with what checks."""
