"""Backends that come with exir-lowering."""
