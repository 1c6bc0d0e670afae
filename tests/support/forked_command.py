"""`exir-lower` in a child of the fork server: as a program, for shell scripts, without the imports of a fresh one."""

from __future__ import annotations

import sys

import forked

done = forked.run("import sys\nfrom exir_lowering.cli import main\nsys.exit(main())", *sys.argv[1:], quiet=False)
sys.stdout.write(done.stdout)
sys.stderr.write(done.stderr)
sys.exit(done.returncode)
