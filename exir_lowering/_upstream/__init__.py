"""Private names of torch and ExecuTorch: one module per subject, and a reason for each name."""
