"""Lowering partitions at once: in threads, in processes, or by any `concurrent.futures.Executor`.

`dispatch` has the step, `executors` who lowers and what a worker does.
"""
