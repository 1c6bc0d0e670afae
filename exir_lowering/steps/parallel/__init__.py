"""Lowering partitions at once: in threads, in processes of our own, or by any `concurrent.futures.Executor`.

`dispatch` has the step, `runners` are who lowers, with what a worker does, and `weight_files` has the weights, in a
file that is shared or sent once and known by their digests. Our own processes are those of `plugins.processes`.
"""
