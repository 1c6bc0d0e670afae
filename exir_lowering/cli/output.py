"""What commands print, hide and write: paragraphs, tables, log lines of libraries, files, and the words of errors."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exir_lowering._upstream import stderr
from exir_lowering.errors import BackendUnavailableWarning, ExportWarning, InputError, LoweringError

if TYPE_CHECKING:
    from rich.console import Console


OK, DEFECT, MISTAKE, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141
"""The exit codes: success, a defect, a mistake in what was given, Ctrl-C, nobody reads the output any more."""

# rich is imported when something is printed: help needs none of it.


def make_console(*, error: bool = False) -> Console:
    """Return a console that prints text as it is, without markup and highlighting."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            """Let `main` see it; rich exits with code 1."""
            raise

    return Plain(stderr=error, highlight=False, markup=False, emoji=False)


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = (), **options: Any
) -> None:
    """Print a table of texts; `right` are columns that are aligned there, the options those of rich's `Table`."""
    from exir_lowering.pte.printing import make_table

    make_console().print(make_table(columns, rows, right, title, padding=(0, 1), **options))


def show(
    found: Any, as_json: bool, make_text: Callable[..., str] | None = None, *, narrowest: int = 60, **options: Any
) -> None:
    """Print a result as JSON, or as the text of its `to_text` or of another function, as wide as the terminal."""
    if as_json:
        print(found.to_json())
        return
    console = make_console()
    text = (make_text or found.to_text)(width=min(max(console.width, narrowest), 160), **options)
    console.print(text, end="", soft_wrap=True)


def say(text: str, *, error: bool = False) -> None:
    """Print a paragraph; wrapped at words in a terminal, left as it is in a file or pipe."""
    console = make_console(error=error)
    console.print(text, soft_wrap=not console.is_terminal)


def kept_from_stdout(wanted: bool) -> AbstractContextManager[object]:
    """Return a context in which what a plug-in prints goes to standard error: it must not end up inside the JSON."""
    return contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext()


def format_size(count: int) -> str:
    """Return a number of bytes as people read it, with the exact one, such as "1.5 MB, 1,500,000 bytes"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}, {count:,} bytes"
    return f"{count} bytes"


def describe_written(path: Path) -> str:
    """Describe a file that was written, with its size, in a sentence without its full stop."""
    return f"Wrote {path} ({format_size(path.stat().st_size)})"


def find_file(text: str) -> Path:
    """Return the path of a file that a command reads; InputError if there is none."""
    path = Path(text)
    if path.is_file():
        return path
    if path.is_dir():
        raise InputError(f"{text!r} is a directory, expected a file.")
    where = "" if path.parent.is_dir() else f"; there is no directory {str(path.parent)!r} either"
    raise InputError(f"There is no file {text!r}{where}.")


def check_target(text: str, suffix: str = "") -> Path:
    """Check a path that a command writes to before the work, not after it; InputError if that is impossible."""
    path = Path(text)
    if suffix and path.suffix != suffix:
        raise InputError(f"Cannot write {text!r}: expected a path that ends in {suffix}, such as 'model{suffix}'.")
    if path.is_dir():
        raise InputError(f"Cannot write {text!r}: it is a directory, expected a file.")
    if not path.parent.is_dir():
        raise InputError(f"Cannot write {text!r}: there is no directory {str(path.parent)!r}. Create it first.")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"Cannot write {text!r}: no permission to write in {str(path.parent.resolve())!r}.")
    return path


def check_targets(**paths: str | None) -> dict[str, Path]:
    """Check the paths that are given of those for some suffixes, and return them by suffix."""
    return {suffix: check_target(path, f".{suffix}") for suffix, path in paths.items() if path is not None}


def write_file(path: Path, content: bytes | memoryview) -> str:
    """Write a file at once, and describe it: a failure (InputError) leaves what was there, as do pipes and devices."""
    from exir_lowering.pte.saving import replace_file

    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
        else:
            replace_file(path, lambda file: file.write(content))
    except OSError as error:
        raise InputError(f"Cannot write {str(path)!r}: {error.strerror or error}. Nothing was changed.") from error
    return describe_written(path)


@contextlib.contextmanager
def quieten() -> Iterator[None]:
    """Silence known noise of torch and ExecuTorch, and what is for programmers; only a command may do the latter."""
    with warnings.catch_warnings(), stderr.without_logs(), stderr.without_noise():
        # Both tell programmers what to change in their code, and a command has no code of theirs.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        show = warnings.showwarning
        warnings.showwarning = lambda message, category, *where: (
            say(f"{'Note' if category is BackendUnavailableWarning else 'warning'}: {message}", error=True)
            if issubclass(category, (BackendUnavailableWarning, ExportWarning))
            else show(message, category, *where)
        )
        yield


# How messages name arguments of `load` and `emit`, and how the command line does.
_OPTIONS = (
    (re.compile(r'\bunavailable="(\w+)"'), r"--unavailable \1"),
    (re.compile(r"\bkeep_originals=True\b"), "--keep-originals"),
    (re.compile(r"\bshare_state=False\b"), "--share-state none"),
    (re.compile(r"^share_state:"), "--share-state:"),
    (re.compile(r"^(?:verify: (?=inputs|tolerance)|quantize: (?=pre|recipe|keep|cal|check))(\w+)\b"), r"--\1"),
    (re.compile(r"^language_model: max_context"), "--max-context"),
    (re.compile(r"^(?:verify|quantize|language_model): "), ""),
    (re.compile(r"\bas data=(?=[.;, ])"), "with --data"),
    (re.compile(r"LoweringOptions\(require_coverage=\.\.\.\)"), "--require-coverage"),
    (re.compile(r'LoweringOptions\(unsupported="allow"\), or target='), "--unsupported allow, or --target "),
    (re.compile(r"\bverify=False\b"), "--check-digests tie"),
)


def describe(error: Exception) -> str:
    """Describe an error in one paragraph, in the command line's words, and below it its page of the documentation."""
    if isinstance(error, LoweringError):
        text = str(error)
        for argument, option in _OPTIONS:
            text = argument.sub(option, text)
        return "\n".join([text, *getattr(error, "__notes__", ())])
    if isinstance(error, MemoryError):
        return f"there is not enough memory{f': {first_line(error)}' if str(error) else ''}."
    return (
        f"unexpected {type(error).__name__}: {error}. This is a defect of exir-lower, or of what it calls; "
        f"the same command with --debug shows where."
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without the full stop; "no message" when there is none."""
    return (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
