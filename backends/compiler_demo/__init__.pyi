from .backend import CompilerDemoBackend as CompilerDemoBackend
from .delegate import CompilerDemoDelegate as CompilerDemoDelegate
