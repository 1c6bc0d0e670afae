"""The lock that plug-ins hold while torch or ExecuTorch trace, decompose or rewrite graphs."""

from __future__ import annotations

from exir_lowering._upstream.locks import conversion as conversion_lock

__all__ = ["conversion_lock"]
