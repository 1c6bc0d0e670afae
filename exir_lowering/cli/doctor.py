"""`exir-lower doctor`: what is installed, what works here, what is off, and why."""

from __future__ import annotations

import argparse
import json
import platform
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from exir_lowering.cli.output import DEFECT, OK, kept_from_stdout, print_table, say
from exir_lowering.errors import LoweringError, ignoring_errors

if TYPE_CHECKING:
    from exir_lowering.plugins.registry import PluginInfo

_PACKAGES = ("exir-lowering", "torch", "executorch", "torchao", "numpy")
EXAMPLES = """\
examples:
  exir-lower doctor
  exir-lower doctor --json
  EXIR_LOWERING_PLAIN=1 exir-lower lower model.pt2 -p xnnpack -o model.pte

Where a feature is off, torch's and ExecuTorch's code does the work: more slowly, and with ExecuTorch's results for
scalar operands and empty concatenations. EXIR_LOWERING_PLAIN=1 turns all features off, for example to find out whether
a defect is in this package. Exit code: 1 if ExecuTorch's runtime or a plug-in cannot be used, otherwise 0.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def execute(arguments: argparse.Namespace) -> int:
    """Look at everything, and print it; 1 if the runtime or a plug-in cannot be used."""
    with kept_from_stdout(True):
        found = _examine()
    broken = bool(found["runtime"]["problem"]) or any(plugin["problem"] for plugin in found["plugins"])
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)
    return DEFECT if broken else OK


def _examine() -> dict[str, Any]:
    from importlib import metadata

    from exir_lowering._upstream import installed, pins
    from exir_lowering.plugins import registry
    from exir_lowering.runtime.native import shim
    from exir_lowering.steps.cache.store import find_folder

    for module in pins.vendor_modules():
        with ignoring_errors():  # XNNPACK's compiler may be what is broken; `why_off` is about what there is
            import_module(module)
    delegates = {"compiler": "", "library": "", "problem": ""}  # in Python, for which a library is compiled
    try:
        delegates["library"] = str(shim.folder())
        delegates["compiler"] = " ".join(shim.compiler())
        shim.library()
    except (LoweringError, OSError, ImportError) as error:
        delegates["problem"] = str(error)
    versions = {"python": platform.python_version(), **dict.fromkeys(_PACKAGES, "not installed")}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "versions": versions,
        "machine": platform.platform(),
        "runtime": {"problem": installed.runtime_failure() or "", "backends": sorted(installed.own_backends())},
        "delegates": delegates,
        "cache": str(find_folder(True)),
        "plugins": [
            {
                "kind": plugin.group.rpartition(".")[2].removesuffix("s"),
                "name": plugin.id,
                "problem": "" if plugin.missing else _problem(plugin),
                "not installed": plugin.missing,
                "install": plugin.error if plugin.missing else "",
            }
            for plugin in registry.list_installed()
        ],
        "features": [
            {"name": name, "does": feature.does, "off": pins.why_off(name), "without": feature.without}
            for name, feature in pins.FEATURES.items()
        ],
    }


def _problem(plugin: PluginInfo) -> str:
    """Return why a plug-in cannot be used; a partitioner is made, which imports its vendor's compiler."""
    from exir_lowering.plugins import registry

    if not plugin.error and plugin.group == registry.PARTITIONERS:
        try:
            registry.find_partitioner(plugin.id)
        except LoweringError as error:
            return str(error)
    return plugin.error


def _show(found: dict[str, Any]) -> None:
    runtime, delegates = found["runtime"], found["delegates"]
    rows = {
        **found["versions"],
        "machine": found["machine"],
        "runtime": runtime["problem"] or f"works, with {', '.join(runtime['backends']) or 'no backend'}",
        "delegates in Python": delegates["problem"] or "work in the runtime",
        "C++ compiler": delegates["compiler"] or "none",
        "compiled library": f"in {delegates['library']}",
        "cache": f"in {found['cache']}, when enabled",
    }
    print_table("Installation", (), rows.items(), show_header=False)
    features = [(one["name"], "off" if one["off"] else "on", one["does"]) for one in found["features"]]
    print_table("Features that rely on torch's and ExecuTorch's code", ("feature", "state", "does"), features)
    for feature in found["features"]:
        if feature["off"]:
            say(f"{feature['name']} is off: {feature['off']}; {feature['without']}.")
    for plugin in found["plugins"]:
        if plugin["problem"]:
            say(f"The {plugin['kind']} {plugin['name']!r} is broken: {plugin['problem']}")
    named = [one for one in found["plugins"] if one["kind"] == "partitioner" and not one["problem"]]
    say(f"Partitioners that work here: {', '.join(one['name'] for one in named if not one['install'])}.")
    for plugin in named:
        if plugin["install"]:
            say(plugin["install"])
