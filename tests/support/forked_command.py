"""`exir-lower` and scripts in a child of the fork server: as programs, for shell scripts, without imports of their own.

`forked_command.py exir-lower ARGUMENTS` and `forked_command.py python SCRIPT ARGUMENTS`, or `python -c CODE`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import forked

program, *arguments = sys.argv[1:]
COMMAND = "import sys\nfrom exir_lowering.cli import main\nsys.exit(main())"
script = "" if program == "exir-lower" else arguments.pop(0)
code = arguments.pop(0) if script == "-c" else Path(script) if script else COMMAND
done = forked.run(code, *arguments, quiet=False)
sys.stdout.write(done.stdout)
sys.stderr.write(done.stderr)
sys.exit(done.returncode)
