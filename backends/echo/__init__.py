"""A backend whose payload is readable text."""
