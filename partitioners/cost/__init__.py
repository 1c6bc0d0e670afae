"""What operators cost on each backend, and the choice that is made of it."""
