"""Payloads are checked by plug-ins; without the one that XNNPACK needs, its payloads are not given to the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch.export import export

from exir_lowering import load, lower
from exir_lowering._upstream import installed
from exir_lowering.errors import BackendFailure, PluginLoadError
from exir_lowering.plugins import registry
from exir_lowering.plugins.payload import CheckedPayload, PayloadChecks, find_checks
from exir_lowering.pte import payloads
from exir_lowering.pte.format import read_program

XNNPACK = "XnnpackBackend"


@pytest.fixture(scope="module")
def content() -> bytes:
    return lower(export(torch.nn.Linear(3, 2).eval(), (torch.ones(1, 3),)), "xnnpack").emit().buffer


def provide(monkeypatch: pytest.MonkeyPatch, *entries: EntryPoint, registered: object = None) -> None:
    """Let these be all that checks payloads."""
    real = registry._entries
    monkeypatch.setattr(registry, "_entries", lambda group: entries if group == registry.PAYLOADS else real(group))
    own = {} if registered is None else {XNNPACK: registered}
    monkeypatch.setitem(registry._registered, registry.PAYLOADS, own)


class Checked(CheckedPayload):
    @property
    def weights(self) -> Mapping[str, int]:
        return {}


class Checks(PayloadChecks):
    backend_id = XNNPACK

    def check(self, payload: memoryview) -> CheckedPayload:
        return Checked()


class Raising(PayloadChecks):
    backend_id = XNNPACK

    def check(self, payload: memoryview) -> CheckedPayload:
        raise ZeroDivisionError("oh")


class Wrong(PayloadChecks):
    backend_id = XNNPACK

    def check(self, payload: memoryview) -> CheckedPayload:
        return None  # type: ignore[return-value]


class TestTheOneOfXnnpack:
    def test_is_an_entry_point_of_the_project(self) -> None:
        tomllib = pytest.importorskip("tomllib")
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
        assert set(project["entry-points"][registry.PAYLOADS]) >= registry.NEEDED

    def test_is_found_and_listed(self) -> None:
        found = registry.find_checks(XNNPACK)
        assert found is not None and found.backend_id == XNNPACK
        (listed,) = [one for one in registry.list_installed() if (one.group, one.id) == (registry.PAYLOADS, XNNPACK)]
        assert not listed.error

    def test_missing_refuses_the_file(self, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        provide(monkeypatch)
        with pytest.raises(PluginLoadError, match=r"'XnnpackBackend' are not given to .* unchecked.*Install it again"):
            load(content)

    def test_missing_does_not_matter_where_the_runtime_has_no_xnnpack(
        self, content: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        provide(monkeypatch)
        monkeypatch.setattr(installed, "own_backends", frozenset)
        assert read_program(memoryview(content), find_checks)["forward"].backends == (XNNPACK,)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("exir_lowering_nowhere:Checks", "could not be imported: ModuleNotFoundError"),
            ("exir_lowering.backends.xnnpack.payload:Nothing", "could not be imported: AttributeError"),
            ("exir_lowering.errors:InputError", "expected a subclass of exir_lowering.plugins.PayloadChecks"),
            ("exir_lowering.plugins:PayloadChecks", "raised TypeError"),
        ],
    )
    def test_broken_refuses_the_file(
        self, content: bytes, monkeypatch: pytest.MonkeyPatch, value: str, message: str
    ) -> None:
        provide(monkeypatch, EntryPoint(XNNPACK, value, registry.PAYLOADS))
        with pytest.raises(PluginLoadError, match=message):
            load(content)

    def test_provided_twice_refuses_the_file(self, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        value = "exir_lowering.backends.xnnpack.payload:XnnpackPayloads"
        provide(monkeypatch, EntryPoint(XNNPACK, value, registry.PAYLOADS), registered=Checks)
        with pytest.raises(PluginLoadError, match="provided twice"):
            load(content)

    @pytest.mark.parametrize(
        ("checks", "message"),
        [(Raising, r"Raising\) failed: ZeroDivisionError: oh"), (Wrong, r"Wrong\) returned None")],
    )
    def test_that_fails_refuses_the_file(
        self, content: bytes, monkeypatch: pytest.MonkeyPatch, checks: type, message: str
    ) -> None:
        provide(monkeypatch, registered=checks)
        with pytest.raises(BackendFailure, match=message):
            load(content)


@pytest.mark.parametrize("backend", ["", "os", "os:system", "exir_lowering.backends.xnnpack.payload", "Xnnpack", "\0"])
def test_an_id_selects_among_plug_ins_only(backend: str) -> None:
    assert payloads.check_payload(backend, memoryview(b""), find_checks) is None
