"""What a plug-in holds to while it runs code of others: the lock of conversions, and what is never to be caught."""

from __future__ import annotations

from exir_lowering._upstream.locks import conversion as conversion_lock
from exir_lowering.errors.interrupts import let_through

__all__ = ["conversion_lock", "let_through"]
