"""A program in a process of its own, which can be interrupted and ended, also in the middle of a kernel.

ExecuTorch's runtime keeps Python's lock while it runs: no thread, signal handler or timeout of the process gets a turn.
`engine` is this side: it waits on a socket, in which Python's lock is free. `runtime.child` is the other one.
`transfer` has inputs and outputs on the way.
"""
