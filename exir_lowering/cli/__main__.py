"""`python -m exir_lowering.cli`: the command line."""

import sys

from exir_lowering.cli import main

sys.exit(main())
