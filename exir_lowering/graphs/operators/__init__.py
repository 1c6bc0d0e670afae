"""Operators: their names, and which ones a file may have executed, with which checks."""
