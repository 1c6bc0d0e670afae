"""`exir-lower plugins`: the installed backends, delegates and partitioners."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from exir_lowering.cli.output import OK, kept_from_stdout, print_table, say

EXAMPLES = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--check", action="store_true", help="import each plug-in, and show which are broken; slower")
    parser.add_argument("--json", action="store_true", help="print the list as JSON, checked")


def execute(arguments: argparse.Namespace) -> int:
    """Print the list of plug-ins, by what their distributions say; if asked for, why some are broken."""
    check = arguments.check or arguments.json
    with kept_from_stdout(True):
        from exir_lowering.plugins import registry

        found = list(registry.list_installed(check=check))
    if arguments.json:
        print(json.dumps([asdict(plugin) for plugin in found], indent=2))
        return OK
    rows = []
    for plugin in found:
        kind = plugin.group.rpartition(".")[2].removesuffix("s")
        state = "not installed" if plugin.missing else "broken" if plugin.error else "ok"
        rows.append((kind, plugin.id, plugin.provider, *[state] * check))
    print_table("Plug-ins", ("kind", "name", "provided by", *["state"] * check), rows)
    for plugin in {plugin.error: plugin for plugin in found if plugin.error}.values():
        say(f"{'Not installed' if plugin.missing else 'Broken'}: {plugin.error}")
    more = "" if check else " None of these was imported: --check does that, and shows which are broken."
    say(f"ExecuTorch's backends are found by class name; they are not listed here.{more}")
    return OK
