"""`exir-lower` and scripts in a child of the fork server: as programs, for shell scripts, without imports of their own.

`forked_command.py exir-lower ARGUMENTS` and `forked_command.py python SCRIPT ARGUMENTS`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import forked

program, *arguments = sys.argv[1:]
COMMAND = "import sys\nfrom exir_lowering.cli import main\nsys.exit(main())"
code = COMMAND if program == "exir-lower" else Path(arguments.pop(0))
done = forked.run(code, *arguments, quiet=False)
sys.stdout.write(done.stdout)
sys.stderr.write(done.stderr)
sys.exit(done.returncode)
