"""Partitioners that come with exir-lowering."""
