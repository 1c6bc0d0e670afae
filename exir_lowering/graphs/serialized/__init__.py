"""Plain values as bytes, and the text of programs that torch evaluates: safe to read from anyone."""
