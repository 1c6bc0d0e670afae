"""Private names of torch and ExecuTorch, a module for each subject, with a line of why for each name."""
