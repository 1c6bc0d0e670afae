"""The public surface is this list; changing it is a decision, not an accident."""

import inspect

import forked

import exir_lowering

PUBLIC = [
    "Adjustment",
    "Artifact",
    "Backend",
    "BackendContext",
    "BackendContractError",
    "BackendFailure",
    "BackendUnavailableError",
    "BackendUnavailableWarning",
    "Choice",
    "CompileSpec",
    "CoverageError",
    "Culprit",
    "Delegate",
    "DelegateContext",
    "DelegationSpec",
    "Doubt",
    "ExplainedResult",
    "FileReport",
    "InputError",
    "InvariantError",
    "LimitError",
    "Limits",
    "LoadedProgram",
    "LoweredMethods",
    "LoweredModule",
    "LoweringError",
    "LoweringOptions",
    "LoweringPlan",
    "MemoryRequirementError",
    "NarrowedDimension",
    "PartitionResult",
    "Partitioner",
    "PartitionerContractError",
    "PluginLoadError",
    "PreprocessResult",
    "Quantized",
    "RefusedPartition",
    "RefusedRewrite",
    "Rejection",
    "Rewrite",
    "RewriteContractError",
    "Rewriting",
    "Scope",
    "UnknownPluginError",
    "Verification",
    "WeightRef",
    "WeightStore",
    "bisect",
    "buckets",
    "inspect",
    "load",
    "lower",
    "lower_whole_program",
    "plan",
    "quantize",
    "register_backend",
    "register_delegate",
    "register_partitioner",
    "register_rewrite",
    "to_backend",
    "verify",
]


def test_the_public_names() -> None:
    assert sorted(exir_lowering.__all__) == PUBLIC
    assert all(hasattr(exir_lowering, name) for name in PUBLIC)


def test_the_signatures() -> None:
    def parameters(function: object) -> str:
        return str(inspect.signature(function)).replace("'", "").replace('"', "")  # type: ignore[arg-type]

    assert [p.name for p in inspect.signature(exir_lowering.lower).parameters.values()] == [
        "programs",
        "partitioners",
        "backends",
        "options",
        "transform_passes",
        "variants",
    ]
    assert [p.name for p in inspect.signature(exir_lowering.to_backend).parameters.values()] == [
        "method_to_program",
        "method_to_partitioner",
        "backends",
        "options",
    ]
    assert [p.name for p in inspect.signature(exir_lowering.lower_whole_program).parameters.values()] == [
        "program",
        "backend_id",
        "compile_specs",
        "backends",
    ]
    assert [p.name for p in inspect.signature(exir_lowering.plan).parameters.values()] == [
        "programs",
        "partitioners",
        "options",
        "transform_passes",
        "variants",
    ]
    assert parameters(exir_lowering.load).startswith("(source")


def test_the_error_tree() -> None:
    tree = {
        "InputError": ValueError,
        "UnknownPluginError": LookupError,
        "PluginLoadError": Exception,
        "PartitionerContractError": Exception,
        "RewriteContractError": Exception,
        "BackendContractError": Exception,
        "BackendFailure": Exception,
        "BackendUnavailableError": Exception,
        "CoverageError": Exception,
        "InvariantError": Exception,
        "LimitError": Exception,
        "MemoryRequirementError": Exception,
    }
    for name, other in tree.items():
        error = getattr(exir_lowering, name)
        assert issubclass(error, exir_lowering.LoweringError) and issubclass(error, other)


def test_every_public_name_is_documented() -> None:
    for name in PUBLIC:
        value = getattr(exir_lowering, name)
        if value.__module__.startswith("exir_lowering"):
            assert inspect.getdoc(value), name


def test_importing_does_not_touch_the_process() -> None:
    """No logger is configured, no warning filter set, no recursion limit changed."""
    script = (
        "import logging, sys, warnings, executorch.exir\n"
        "def state(): return (logging.root.level, len(logging.root.handlers), len(warnings.filters), "
        "sys.getrecursionlimit())\n"
        "before = state()\n"
        "import exir_lowering\n"
        "assert state() == before, (before, state())\n"
    )
    done = forked.run(script, fresh=True, quiet=False)
    assert done.returncode == 0, done.stderr[-1500:]
