"""How host operators become others that run: what is wrong with kernels, rules, and their tracing."""
