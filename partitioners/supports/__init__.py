"""What a backend can take, as values that can be combined and that give reasons."""
