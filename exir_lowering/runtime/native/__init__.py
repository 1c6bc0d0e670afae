"""ExecuTorch's own runtime as an engine, and the bridge from it to Python delegates."""
