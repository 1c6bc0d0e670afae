"""Moved to exir_lowering.lowering_plan (the name `plan` is a public function); import from there. This file goes away."""

from exir_lowering.lowering_plan import *  # noqa: F403
