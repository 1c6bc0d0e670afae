"""How tests share workers, and what is done once for all of them.

Tests of a file run in one worker, so that they share fixtures; some files are divided. The groups that take longest
come first, so that the workers end at the same time.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import tempfile
from collections import Counter

import forked
import pytest
import quantizer_patterns
from schedule import SECONDS, choose_nightly, group_of


class _Defects(logging.Handler):
    """Fails a test in which a built-in rewrite raises: lowering logs it, and leaves the rewrite out."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        assert "a defect of exir-lowering" not in message, message


def pytest_configure(config: pytest.Config) -> None:
    """Keep xdist from ordering groups by their number of tests, start the fork server early, and keep a cache apart."""
    gc.set_threshold(10_000)  # programs are many small objects that live
    logging.getLogger("exir_lowering.steps.rewrite").addHandler(_Defects())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as under nohup, and in the background of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "EXIR_LOWERING_CACHE" not in os.environ:
        os.environ["EXIR_LOWERING_CACHE"] = tempfile.mkdtemp(prefix="lowered-")
        starter = os.getpid()
        config.add_cleanup(lambda: _remove(os.environ["EXIR_LOWERING_CACHE"], starter))
    if getattr(config.option, "loadscopereorder", False):
        config.option.loadscopereorder = False
    workers = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if workers and "EXIR_LOWERING_FRESH" not in os.environ:
        forked.serve()


def _remove(folder: str, starter: int) -> None:
    if os.getpid() == starter:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests for `--dist loadgroup`, order the groups: those of most seconds first; leave what is nightly."""
    for item in choose_nightly(items):
        item.add_marker(pytest.mark.nightly)
    groups = {item: group_of(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    sizes = Counter(groups.values())
    items.sort(key=lambda item: (-SECONDS.get(groups[item], 0.2 * sizes[groups[item]]), groups[item]))


def pytest_collection_finish() -> None:
    """Export the patterns of quantizers once, where the tests have imported one."""
    quantizer_patterns.remember()


@pytest.fixture(autouse=True, scope="module")
def imported_is_no_garbage() -> None:
    """Set aside what is imported and shared so far: a full collection walked over gigabytes, for seconds."""
    gc.collect()
    gc.freeze()
