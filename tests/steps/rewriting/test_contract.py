"""What rewrites of others may do, and what ends in an error that names them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewriting_support import versions
from torch import nn
from torch.export import export
from torch.fx import Node

import exir_lowering
from exir_lowering import LoweringOptions, Rewrite
from exir_lowering.errors import InputError, PluginLoadError, RewriteContractError
from exir_lowering.graphs import operator_name
from exir_lowering.plugins import Scope
from exir_lowering.plugins.rewrite import find_rewrites

X = torch.randn(3, 8)
RELU = "aten.relu.default"


class Apply(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def rewrite(function: Callable[[Node, Scope], Any], operators: Any = (RELU,), when: str = "always") -> Rewrite:
    """Return a rewrite that a function does."""
    content = {"name": "other", "operators": operators, "exactness": "bits", "when": when}
    kind = type("Other", (Rewrite,), {**content, "rewrite": lambda self, node, scope: function(node, scope)})
    return kind()  # type: ignore[no-any-return]


def lower(one: Rewrite, model: Callable[..., Any] = lambda x: torch.relu(x).exp(), partitioner: Any = None) -> Any:
    program = export(Apply(model), (X,))
    return exir_lowering.lower({"one": program, "two": program}, partitioner, options=LoweringOptions(rewrites=[one]))


KEPT: list[Node] = []


def of_another_method(node: Node, scope: Scope) -> Node:
    KEPT.append(node.all_input_nodes[0])
    return scope.call("aten.neg.default", KEPT[0])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda node, scope: scope.call(RELU, node), "which depends on it. Use its operands"),
        (lambda node, scope: scope.call(RELU, next(iter(node.users))), "which is not computed before"),
        (lambda node, scope: next(iter(node.users)), "which is computed after it"),
        (of_another_method, "which is not computed before"),
        (lambda node, scope: scope.call("aten.no.such", node.args[0]), "raised AttributeError"),
        (lambda node, scope: scope.call("aten.permute_copy.default", node.args[0], [1, 0]), "replaced a tensor"),
    ],
)
def test_what_is_not_a_value_for_the_node_is_refused_by_name(function: Any, message: str) -> None:
    with pytest.raises(RewriteContractError, match=re.escape(message)) as caught:
        lower(rewrite(function))
    assert "'other'" in str(caught.value)


def test_a_rewrite_of_this_package_that_fails_is_left_out_and_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the handler of tests/conftest.py, which makes that a failure.
    monkeypatch.setattr(logging.getLogger("exir_lowering.steps.rewrite"), "handlers", [])
    broken = rewrite(lambda node, scope: scope.call("aten.no.such", node.args[0]))
    type(broken).__module__ = "exir_lowering.rewrites.broken"
    with caplog.at_level(logging.WARNING, "exir_lowering"):
        method = lower(broken).report.methods[0]
    (refused,) = method.refused_rewrites
    assert "raised AttributeError" in refused.reason and "report it" in refused.advice
    assert not method.rewritings and "raised AttributeError" in caplog.text


def test_operators_are_given_by_name() -> None:
    with pytest.raises(PluginLoadError, match="operators"):
        lower(rewrite(lambda node, scope: None, operators=(torch.ops.aten.relu.default,)))


def test_what_was_made_and_not_used_is_removed() -> None:
    def function(node: Node, scope: Scope) -> Node | None:
        scope.call("aten.sin.default", node.args[0])
        return scope.call("aten.clamp.default", node.args[0], 0.0)

    nodes = [node for node in lower(rewrite(function))["one"].graph.nodes if node.op == "call_function"]
    assert list(map(operator_name, nodes)) == ["aten.clamp.default", "aten.exp.default"]


@pytest.mark.parametrize("when", ["always", "taken"])
def test_operators_of_others_are_replaced(when: str) -> None:
    name = f"foo_{when}"  # torch and ExecuTorch remember operators
    with torch.library._scoped_library("rewriting_contract", "FRAGMENT") as library:
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, torch.relu, "CompositeExplicitAutograd")
        library.impl(name, torch.empty_like, "Meta")
        other = rewrite(
            lambda node, scope: scope.call(RELU, node.args[0]),
            operators=(f"rewriting_contract.{name}.default",),
            when=when,
        )
        lowered = lower(other, lambda x: getattr(torch.ops.rewriting_contract, name)(x) + 1, "xnnpack")
    assert not any("foo" in str(node.target) for node in lowered["one"].graph.nodes)


def test_a_form_for_a_backend_may_be_what_is_computed_later_too() -> None:
    found = versions(
        Apply(lambda x: (x.exp().mean(-1).relu(), x.exp().view(1, 3, 1, 8).relu() + 1)),
        (X,),
        ["safe"],
        partitioners="xnnpack",
    )
    found.check(X)


def test_a_program_without_inputs_gets_constants() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4, 4))

        def forward(self) -> torch.Tensor:
            columns, rows = torch.arange(4).float()[:, None] * 2, torch.arange(4).float()[None] * 3
            self.count.add_(1)
            return torch.sin(self.count * columns + rows)

    found = versions(Counter(), (), ["safe"])
    assert found.after != found.before
    for _ in range(2):
        found.check()


def test_a_buffer_that_is_only_written_stays() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(3, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last.copy_(torch.zeros_like(self.last) + x)
            return x + 1

    other = rewrite(
        lambda node, scope: scope.call("aten.full.default", [3, 8], 0.0, dtype=torch.float32),
        operators=("aten.full_like.default",),
    )
    found = versions(Last(), (X,), [other])
    assert "aten.full_like.default" in found.before and "aten.full_like.default" not in found.after
    found.check(X)


def test_rewrites_of_this_package_have_their_names() -> None:
    (safe,) = ([*find_rewrites("safe")],)
    assert [type(one) for one in safe] == [type(one) for one in find_rewrites([each.name for each in safe])]
    assert find_rewrites("none") == find_rewrites([]) == ()


def test_two_rewrites_with_one_name_and_rewrites_without_an_end() -> None:
    first, second = rewrite(lambda node, scope: None), rewrite(lambda node, scope: None)
    with pytest.raises(InputError, match="are both named 'other'"):
        exir_lowering.lower(export(Apply(torch.relu), (X,)), options=LoweringOptions(rewrites=[first, second]))
    endless = rewrite(lambda node, scope: scope.call(RELU, node.args[0], like=node))
    with pytest.raises(RewriteContractError, match=r"'other'.*they undo each other, or one never ends"):
        lower(endless)
