"""The backends that come with exir-lowering."""
