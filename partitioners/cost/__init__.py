"""What operators cost on each backend, and the problem of choosing among them."""
