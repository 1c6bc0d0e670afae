"""What a backend can take, as values that are combined and that say why not."""
