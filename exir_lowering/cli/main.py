"""The program `exir-lower`: its parser, how it reports errors, the exit codes."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from exir_lowering.cli.output import DEFECT, INTERRUPTED, MISTAKE, OK, PIPE_CLOSED, describe, quieten, say
from exir_lowering.errors import InvariantError, LoweringError, did_you_mean

_COMMANDS: Mapping[str, str] = {
    "lower": "lower models to one .pte file: a .pt2, a function, a folder of transformers",
    "plan": "show what lower would delegate, and why the rest stays on the host",
    "quantize": "quantise a model to int8, and measure the error of each layer",
    "run": "run a method of a .pte file, in the ExecuTorch runtime",
    "inspect": "show what is in a .pte or .ptd file",
    "check": "say whether shipped runtimes run a .pte file",
    "verify": "compare a .pte file with eager PyTorch, on inputs that find errors",
    "bisect": "find the operator that goes wrong in a backend",
    "bench": "measure the time and memory of a .pte file, or compare two",
    "new-backend": "write a package with a backend that works, to be changed",
    "plugins": "list the installed backends, delegates, partitioners and rewrites",
    "cache": "show or clear the cache of lowered partitions",
    "doctor": "show what works here, what is off, and why",
    "demo": "lower a trained sentence-embedding model, run it, compare with PyTorch",
}
"""The commands, in the order of the help: modules here with `add_arguments`, `EXAMPLES`, which their help ends with,
and `execute`, which takes the parsed arguments, and returns the exit code or raises a LoweringError."""

_MEANT = {"diff": "inspect A B", "compare": "inspect A B", "profile": "run --profile", "benchmark": "bench",
          **dict.fromkeys(("convert", "compile", "export"), "lower")}  # fmt: skip

_SELDOM = """
imports require_coverage require_memory memory_planner bounds sizes unsupported fast rewrites assume dot
fuse_quantized keep_originals share_state on_backend_error no_provenance etrecord jobs cache no_cache seed warm_up
check_digests unavailable against_data library
"""  # the options that a command's `--help` only names

# Why a terminal, a pipe or a redirected output takes no more.
_FULL = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

_EXAMPLES = """\
examples:
  exir-lower demo
  exir-lower plan model.pt2 --partitioner xnnpack --html plan.html
  exir-lower lower model.pt2 --partitioner xnnpack -o model.pte
  exir-lower lower model.py:make --partitioner xnnpack -o model.pte
  exir-lower run model.pte
  exir-lower verify model.pte model.pt2
  exir-lower bisect model.pt2 --partitioner xnnpack

`exir-lower COMMAND --help` explains a command.
Exit code: 0 success, 2 invalid input or a wrong result, 1 any other failure.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments of the process; return the exit code (see `output`)."""
    # A character that the terminal's encoding lacks is shown escaped, rather than causing a crash after the work.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _execute(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _give_up_stdout()
        return PIPE_CLOSED
    except OSError as error:
        _give_up_stdout()
        with contextlib.suppress(OSError):
            say(f"exir-lower: the output cannot be written: {error.strerror or error}.", error=True)
        return DEFECT
    except KeyboardInterrupt:
        return INTERRUPTED


def _give_up_stdout() -> None:
    """Discard what has not been written yet: Python flushes once more when it exits, and that must not fail too."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _execute(argv: Sequence[str] | None) -> int:
    """Parse the arguments and execute the command; print an error as one paragraph, with its page."""
    try:
        arguments = _make_parser().parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else MISTAKE
    debug = getattr(arguments, "debug", False)  # given before or after the command's name
    try:
        with contextlib.nullcontext() if debug else quieten():
            code: int = arguments.execute(arguments)
        return code
    except (MemoryError, Exception) as error:
        # Errors about files name the file, those about standard output or error do not.
        if isinstance(error, OSError) and not error.filename and error.errno in _FULL:
            raise
        if debug:
            traceback.print_exception(error)
        mistake = isinstance(error, LoweringError) and not isinstance(error, InvariantError)
        say(f"exir-lower {arguments.name}: {describe(error)}", error=True)
        return MISTAKE if mistake else DEFECT


class _Parser(argparse.ArgumentParser):
    """A parser whose help describes what is used most, and whose errors are short and name the nearest word."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = sys.argv[1:] if args is None else args
        found, rest = super().parse_known_args(args, namespace)
        if rest:  # here, where the options of the command are known
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """End with one line that says what is wrong, after the usage."""
        known, hint = self._option_string_actions, ""
        words = [word.partition("=")[0] for word in self._given if word.startswith("--")]
        unknown = [word for word in words if not any(option.startswith(word) for option in known)]
        choice = re.search("invalid choice: '?(.*?)'? \\(choose from (.*)\\)", message)
        if choice is not None:
            sure = [word for name, word in _MEANT.items() if name == choice[1]]
            hint = did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2]), sure=sure)
            message = f"there is no command {choice[1]!r}" if "argument COMMAND" in message else message
        elif unknown:  # which may be why another one is missing
            message = message if "unrecognized" in message else f"unrecognized arguments: {unknown[0]}"
            hint = did_you_mean(unknown[0], known)
        self.exit(MISTAKE, f"{self.format_usage()}{self.prog}: {message}.{hint} See `{self.prog} --help`.\n")

    def format_help(self) -> str:
        """Return the help, in which options that are seldom used are only named, unless all are asked for."""
        more = [action for action in self._actions if action.dest in _SELDOM.split()]
        if len(more) > 1 and "--help-all" not in self._given:
            names = ", ".join(name for action in more for name in action.option_strings if name.startswith("--"))
            told = textwrap.fill(f"more options, which --help-all describes: {names}", 80, break_on_hyphens=False)
            self.epilog = f"{told}\n\n{self.epilog}"
            for action in more:
                action.help = argparse.SUPPRESS
        return super().format_help()


class _Version(argparse.Action):
    """Finds out about versions when they are asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        named = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "executorch"))
        python = ".".join(map(str, sys.version_info[:3]))
        print(f"exir-lower {metadata.version('exir-lowering')} ({named}, Python {python})")
        parser.exit(OK)


def _make_parser() -> _Parser:
    debug = _Parser(add_help=False)
    debug.add_argument(
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show the traceback of an error, and all log lines of the underlying libraries",
    )
    debug.add_argument("--help-all", action="help", help="describe every option, and exit")
    raw, does = argparse.RawDescriptionHelpFormatter, "Lower models to one ExecuTorch .pte file, run it and check it."
    parser = _Parser("exir-lower", description=does, epilog=_EXAMPLES, formatter_class=raw, parents=[debug])
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions, and exit")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="name", required=True)
    for name, summary in _COMMANDS.items():
        command: Any = importlib.import_module(f"exir_lowering.cli.{name.replace('-', '_')}")
        more: Any = {"epilog": command.EXAMPLES, "formatter_class": raw, "parents": [debug]}
        does = f"{summary[0].upper()}{summary[1:]}."
        subparser = subparsers.add_parser(name, help=summary, description=does, **more)
        command.add_arguments(subparser)
        usage = " ".join(subparser.format_usage().split()[1:])
        subparser.usage = re.sub(r"\[-([^][]|\[[^][]*\])*\] ?", "", f"{usage} ").rstrip() + " [options]"
        subparser.set_defaults(execute=command.execute)
    return parser
