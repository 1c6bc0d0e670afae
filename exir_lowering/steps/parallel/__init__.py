"""Lowering partitions at once: in threads, in processes of our own, or by any `concurrent.futures.Executor`.

`dispatch` has the step, `runners` are who lowers, `work` is what a worker does, and `weights` are in a file that is
shared, or are known by their digests. Our own processes are those of `plugins.processes`.
"""
