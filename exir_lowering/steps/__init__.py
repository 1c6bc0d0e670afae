"""The steps of the line, each a module with the product that it makes."""
