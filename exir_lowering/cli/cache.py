"""`exir-lower cache`: what the cache of lowered partitions holds, and how to empty it."""

from __future__ import annotations

import argparse
import json

from exir_lowering.cli.output import OK, format_size, kept_from_stdout, print_table, say
from exir_lowering.errors import InputError

EXAMPLES = """\
examples:
  exir-lower cache info
  exir-lower cache clear --cache FOLDER

Everything in the cache can be removed at any time; the next lowering then takes longer.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("action", choices=("info", "clear"), help="show what is in the cache, or remove it")
    parser.add_argument("--cache", metavar="FOLDER", help="the cache folder (default: the user's)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Show or clear the cache."""
    with kept_from_stdout(True):
        from exir_lowering.steps.cache.store import Store, find_folder, find_limit

    folder = find_folder(arguments.cache or True)
    try:
        store = Store(folder, find_limit())
        removed = store.trim(0) if arguments.action == "clear" else 0
        files = store.files()
    except OSError as error:
        raise InputError(f"The cache in {str(folder)!r} cannot be used: {error.strerror or error}.") from error
    size = sum(state.st_size for _, state in files)
    figures = {"folder": str(folder), "partitions": len(files), "bytes": size, "limit": store.limit}
    if arguments.json:
        print(json.dumps(figures | ({"removed": removed} if arguments.action == "clear" else {}), indent=2))
    elif arguments.action == "clear":
        say(f"Removed {format_size(removed)} from {folder}.")
    else:
        rows = {"folder": str(folder), "lowered partitions": str(len(files))}
        rows["size"] = f"{format_size(size)} of at most {format_size(store.limit)}"
        print_table("Cache", ("", ""), rows.items(), show_header=False)
    return OK
