"""`--config lowering.toml`: arguments from a file, and `--save-config`, which writes those that were given to one.

A key is the long name of an option, "models", or "rules": the arguments of --allow, --deny and --pin, in their order.
The command line takes precedence. `lower` and `plan` can read the same file: each ignores options that only the other
one has. A file is data: it can neither set `trust` nor name code, such as a partitioner in a Python file, unless the
command line has --trust.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from exir_lowering.cli.output import check_target, describe_written, find_file, say, write_file
from exir_lowering.cli.partitioning import AppendRule, read_partitioner, read_variant
from exir_lowering.errors import InputError, did_you_mean

_NEVER = ("config", "save-config", "trust", "debug")
_EXCLUDED = {"cache": "no_cache", "no-cache": "cache"}
"""By setting, what a command line may give that does not go with it."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    command.add_argument(
        "--config",
        metavar="LOWERING.toml",
        help="read options that are not given here from this file; its keys are named like the options",
    )
    command.add_argument(
        "--save-config", metavar="LOWERING.toml", help="write the given options to this file, for --config"
    )


class Parser(argparse.ArgumentParser):
    """A parser whose arguments can be listed."""

    def list_actions(self) -> list[argparse.Action]:
        """Return its arguments, without --help."""
        return [action for action in self._actions if "--help" not in action.option_strings]


class _Probe(argparse.ArgumentParser):
    """Finds what is given, and leaves it to the real parser to say what is wrong."""

    def take(self, action: argparse.Action) -> None:
        """Take an argument of another parser as text, which may be missing."""
        copied = copy.copy(action)
        copied.default, copied.type, copied.choices, copied.required = argparse.SUPPRESS, None, None, False
        copied.nargs = copied.nargs if copied.option_strings else "*"
        self._add_action(copied)

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def _list_given(parser: Parser, argv: Sequence[str]) -> dict[str, Any]:
    """Return what arguments give, as texts, by destination; nothing if they are wrong."""
    probe = _Probe(add_help=False)
    for action in parser.list_actions():
        probe.take(action)
    try:
        return vars(probe.parse_known_args(list(argv))[0])
    except argparse.ArgumentError:
        return {}


def name_given(parser: Parser, argv: Sequence[str]) -> dict[str, Any]:
    """Return what arguments give, as texts, by the name in a file."""
    given = _list_given(parser, argv)
    return {key: given[action.dest] for key, action in _by_key(parser).items() if action.dest in given}


def expand(parser: Parser, others: Iterable[Parser], argv: list[str]) -> list[str]:
    """Return the arguments after those of --config's file; InputError if it has a setting that no parser knows."""
    given = _list_given(parser, argv)
    if not given.get("config"):
        return argv
    settings, known = _read(given["config"]), _by_key(parser)
    elsewhere = {key for other in others if "config" in map(_key, other.list_actions()) for key in _by_key(other)}
    places: list[str] = []
    options: list[str] = []
    for key, value in settings.items():
        who = f"{given['config']}: {key}"
        if key in known:
            _check_trust(who, key, value, "trust" in given)
            if not {known[key].dest, _EXCLUDED.get(key)} & given.keys():
                (options if known[key].option_strings else places).extend(_to_arguments(who, known[key], value))
        elif key not in elsewhere:
            hint = did_you_mean(key, [*known, *elsewhere], f" There is {', '.join(known)}.")
            why = " It can only be given on the command line." if key in _NEVER else hint
            raise InputError(f"{who}: no setting has this name.{why}")
    return [*places, *options, *argv]


def _by_key(parser: Parser) -> dict[str, argparse.Action]:
    """Return what can be in a file, by its name there."""
    return {key: action for action in parser.list_actions() if (key := _key(action)) not in _NEVER}


def _key(action: argparse.Action) -> str:
    if isinstance(action, AppendRule) or not action.option_strings:
        return action.dest
    return next(name for name in action.option_strings if name.startswith("--")).removeprefix("--")


def _check_trust(who: str, key: str, value: Any, trusted: bool) -> None:
    read = {"partitioner": lambda text: [read_partitioner(text)], "variant": lambda text: read_variant(text)[1]}
    for text in value if key in read and isinstance(value, list) else ():
        if isinstance(text, str) and any(one.factory for one in read[key](text)) and not trusted:
            raise InputError(
                f"{who}: {text!r} would run code that a file names. If the file is yours, give --trust on the command "
                "line, or give the option there."
            )


def _to_arguments(who: str, action: argparse.Action, value: Any) -> list[str]:
    """Return the arguments that a setting stands for."""
    name = action.option_strings[-1] if action.option_strings else ""
    several = isinstance(action.default, list) or not name
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise InputError(f"{who}: got {value!r}, expected true or false.")
        return [name] if value else []
    if several and not isinstance(value, list):
        raise InputError(f'{who}: got {value!r}, expected a list of strings, such as ["..."].')
    texts = value if several else [value]
    for text in texts:
        if not isinstance(text, str) and (several or isinstance(text, bool) or not isinstance(text, (int, float))):
            raise InputError(f"{who}: got {text!r}, expected a string{'' if several else ' or a number'}.")
    if not isinstance(action, AppendRule):
        return [f"{name}={text}" if name else str(text) for text in texts]
    pairs = [text.partition(" ") for text in texts]
    for kind, _, criteria in pairs:
        if kind not in ("allow", "deny", "pin") or not criteria:
            raise InputError(f'{who}: got {kind!r}, expected rules such as "deny op=aten.add" or "allow name=add_1".')
    return [f"--{kind}={criteria.strip()}" for kind, _, criteria in pairs]


def _read(path: str) -> dict[str, Any]:
    import tomllib

    try:
        found: dict[str, Any] = tomllib.loads(find_file(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"--config {path!r}: it is not a TOML file: {error}.") from error
    return found


@contextlib.contextmanager
def kept(arguments: argparse.Namespace) -> Iterator[None]:
    """Write what was given to the file of --save-config, if the work succeeds; InputError if it cannot be written."""
    path = getattr(arguments, "save_config", None)
    if path is None:
        yield
        return
    target = check_target(path, ".toml")
    yield
    lines = [f"{key} = {_to_toml(value)}\n" for key, value in arguments.given.items()]
    write_file(target, "".join(lines).encode())
    say(f"{describe_written(target)}.", error=True)


def _to_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_to_toml, value))}]"
    # A JSON text is one of TOML, but for DEL, and the two halves of characters that are not in UTF-8.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
