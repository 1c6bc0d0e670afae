"""Operators that no runtime has a kernel for, as functions of operators that it has."""
