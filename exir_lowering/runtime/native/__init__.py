"""The bridge from ExecuTorch's runtime to Python delegates."""
