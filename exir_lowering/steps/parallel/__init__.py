"""Lowering partitions at once: in threads, in processes of our own, or by any `concurrent.futures.Executor`.

`dispatch` has the step. What travels is bytes: `messages` says which; `weights` are in a file that is shared, or are
known by their digests. `work` is what a worker does; our own processes are those of `plugins.processes`.
"""
