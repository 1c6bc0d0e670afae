"""The folders that tests and the processes that they start import from."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
IMPORTED = os.pathsep.join(map(str, (ROOT, SUPPORT, TESTS / "contracts")))
"""What a child's PYTHONPATH begins with."""
