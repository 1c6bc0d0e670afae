"""Lowering partitions at once: in threads, in processes of our own, or by any `concurrent.futures.Executor`.

`dispatch` has the step; `runners` are who lowers, with what a worker does and how it gets the weights. Our own
processes are those of `plugins.processes`.
"""
