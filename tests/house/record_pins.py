"""Write down what the installed torch and ExecuTorch are where this package depends on their code.

python tests/house/record_pins.py           show what is not what it was, or not known yet
python tests/house/record_pins.py --write   add the digests of the installed versions to those that are known

Only write what was looked at, and what the whole suite passes with: CONTRIBUTING.md says how.
"""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from exir_lowering._upstream import pins


def main() -> int:
    """Compare, or write; return 1 if something is not known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for module in pins.vendor_modules():
        import_module(module)
    unknown = 0
    for feature in pins.FEATURES.values():
        for place, known in feature.code.items():
            found = pins.digest_of(pins.find(place))
            if found not in known:
                unknown += 1
                print(f"{place}: {found} is not one of {known}")
                feature.code[place] = [*known, found]
    if given.write:
        table = {name: asdict(feature) for name, feature in pins.FEATURES.items()}
        Path(pins.__file__).with_name("pins.json").write_text(json.dumps(table, indent=1) + "\n")
        return 0
    return int(unknown > 0)


if __name__ == "__main__":
    raise SystemExit(main())
