"""A program in a separate process, which can be interrupted and ended, also in the middle of a kernel.

ExecuTorch's runtime keeps Python's lock while it runs: no thread, signal handler or timeout of the process gets a turn.
`engine` is this side: it waits on a socket, which leaves Python's lock free. `runtime.child` is the other side, which
`process` starts; `transfer` moves inputs and outputs.
"""
