"""Edge conversion case by case: each distinct operator call is converted once, by torch's and ExecuTorch's own code."""
