"""Rules for plug-ins that run other code: the conversion lock, and exceptions that must not be caught."""

from __future__ import annotations

from exir_lowering._upstream.locks import conversion as conversion_lock
from exir_lowering.errors import let_through

__all__ = ["conversion_lock", "let_through"]
