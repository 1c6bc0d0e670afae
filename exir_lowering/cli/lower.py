"""`exir-lower lower`: exported programs to one `.pte` file, with methods that return a constant."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exir_lowering.cli import partitioning, program_files
from exir_lowering.cli.output import (
    OK,
    check_target,
    describe_written,
    format_size,
    kept_from_stdout,
    make_console,
    print_table,
    say,
)
from exir_lowering.errors import InputError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from exir_lowering.lowered import LoweredMethods
    from exir_lowering.plans.report import Report
    from exir_lowering.steps.emit import Artifact
    from exir_lowering.steps.shared_state import ShareState


EXAMPLES = """\
examples:
  exir-lower lower model.pt2 --partitioner xnnpack -o model.pte
  exir-lower lower prefill=prefill.pt2 decode=decode.pt2 --partitioner xnnpack -o llm.pte
  exir-lower lower forward=llm.pt2 step=step.pt2 -p xnnpack -o llm.pte --runner-metadata --constant get_eos_ids=[1,2]
  exir-lower lower model.pt2 --partitioner mine --partitioner xnnpack -o model.pte --json > report.json
  exir-lower lower model.pt2 -p my_module:partitioner -p xnnpack -o model.pte
  exir-lower lower model.pt2 --variant npu=mine,xnnpack --variant cpu=xnnpack -o model.pte

A .pt2 file is made by torch.export.save(torch.export.export(model, inputs), "model.pt2").
A file that would run code when it is loaded is refused; give --trust if it comes from somebody you trust.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    program_files.add_arguments(parser)
    program_files.add_variants(parser)
    parser.add_argument("-o", "--output", required=True, metavar="OUT.pte", help="the file to write")
    parser.add_argument(
        "--external-weights", metavar="NAME", help="put weights into the data file NAME.ptd beside the .pte file"
    )
    parser.add_argument(
        "--keep-originals",
        action="store_true",
        help="keep the delegates' original graphs, for machines that lack a backend",
    )
    parser.add_argument(
        "--fuse-quantized",
        action="store_true",
        help="fuse quantized patterns on the host, such as an embedding of quantized weights, into quantized operators",
    )
    add_sharing(parser)
    parser.add_argument(
        "--on-backend-error",
        choices=("raise", "fallback", "split"),
        default="raise",
        help="what to do when a backend fails on a partition: end with its error (default); leave its operators to the "
        "next partitioner or the host (fallback); or cut it until those that fail are isolated, and leave those "
        "(split)",
    )
    parser.add_argument(
        "--no-provenance",
        action="store_true",
        help="do not store in the file how it was made, nor the names of inputs, outputs and weights",
    )
    _add_constants(parser)
    parser.add_argument("--etrecord", action="store_true", help="also write OUT.etrecord, for ExecuTorch's Inspector")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many partitions are lowered at once")
    parser.add_argument("--sizes", action="store_true", help="show how many bytes each part of the files takes")
    caching = parser.add_mutually_exclusive_group()
    caching.add_argument("--cache", metavar="FOLDER", help="use the cache in this folder instead of the user's")
    caching.add_argument("--no-cache", action="store_true", help="do not use a cache")
    parser.add_argument(
        "--explain-cache", action="store_true", help="show what was in the cache, and why the rest was not"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of tables")


def add_sharing(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the state that methods share."""
    parser.add_argument(
        "--share-state",
        type=_read_sharing,
        default="auto",
        metavar="auto|all|none|NAME,...",
        help="the state that methods share: all, state with the same name; NAME,..., the named state; none; auto (the "
        "default), buffers that shared memory at export, which .pt2 files do not record",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Lower the programs, write the files and print the report."""
    files = program_files.find_programs(arguments.models)
    target = check_target(arguments.output, ".pte")
    data = arguments.external_weights
    if data is not None and (not data.removesuffix(".ptd") or "/" in data or "\\" in data):
        raise InputError(
            f"--external-weights {data!r}: expected the name of a file beside the .pte file, without a directory, such "
            "as 'weights'."
        )
    values = read_constants(arguments, files)
    partitioning.check_arguments(arguments)
    with kept_from_stdout(arguments.json):
        from exir_lowering._upstream.compiler import ExecutorchBackendConfig
        from exir_lowering.pipeline import lower

        cached = False if arguments.no_cache else arguments.cache or True
        options = program_files.make_options(
            arguments, cache=cached, jobs=arguments.jobs, on_backend_error=arguments.on_backend_error
        )
        chosen = partitioning.make(arguments)
        lowered = lower(program_files.read_programs(files, arguments.trust), **chosen, options=options)
        if arguments.runner_metadata:
            programs = {name.partition("@")[0]: one for name, one in lowered.edge_programs.items()}
            values = add_metadata(values, programs["forward"])
        fusing = ExecutorchBackendConfig(do_quant_fusion_and_const_prop=True)
        artifact = lowered.emit(
            fusing if arguments.fuse_quantized else None,
            constant_methods=values,
            external_weights=arguments.external_weights,
            keep_originals=arguments.keep_originals,
            etrecord=arguments.etrecord,
            share_state=arguments.share_state,
            provenance=not arguments.no_provenance,
        )
        artifact.save(target)
    warn_of_narrowed(lowered.report)
    if arguments.share_state == "auto":
        _warn_of_unshared(artifact)
    if arguments.json:
        report = json.loads(artifact.report.to_json())
        if arguments.sizes:
            report["stored"] = [asdict(row) for row in artifact.stored]
        print(json.dumps(report, indent=2))
    else:
        _print_tables(arguments, lowered, artifact)
    say(_list_written(target, artifact, values), error=arguments.json)
    return OK


def _read_sharing(text: str) -> ShareState:
    words: dict[str, ShareState] = {"auto": "auto", "all": True, "none": False}
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected auto, all, none or names separated by commas, got {text!r}")
    return words.get(text, names)


def warn_of_narrowed(report: Report) -> None:
    """Say which sizes of an input the conversion did not take into account; programs of files mostly keep theirs."""
    if report.narrowed:
        first, *others = report.narrowed
        say(f"warning: {first}{f' (and {len(others)} more dimensions)' if others else ''}.", error=True)


def _warn_of_unshared(artifact: Artifact) -> None:
    """Say which methods write state of one name, each its own."""
    from exir_lowering.steps.shared_state import list_namesakes

    found = list_namesakes(artifact.report.states)
    if found:
        (name, methods), *others = found
        also = f" (and {', '.join(name for name, _ in others[:3])}{', ...' * (len(others) > 3)})" if others else ""
        say(
            f"warning: {' and '.join(methods)} each write a separate {name!r}{also}. If they are the same state, give "
            f"--share-state all or --share-state {name}; if they are not, --share-state none.",
            error=True,
        )


def _print_tables(arguments: argparse.Namespace, lowered: LoweredMethods, artifact: Artifact) -> None:
    from exir_lowering.plans.views import describe_memory

    make_console().print(lowered.report.table())
    for method in artifact.report.methods:
        say(f"{method.name}: planned memory {describe_memory(method.memory)}.")
    for refused in lowered.report.refused:
        say(f"{refused}.")
    if arguments.sizes:
        from exir_lowering.steps import placement

        make_console().print(placement.table(artifact.stored, limit=20))
    if arguments.explain_cache:
        uses = ((use.method, use.partition or "(conversion)", use.explain()) for use in lowered.report.cache)
        print_table("Cache", ("method", "partition", "cache"), uses)
    host = sum(len(method.host) for method in lowered.report.methods)
    if host and (arguments.partitioner or arguments.variant):
        from exir_lowering.plans.formatting import many

        stay = f"{many(host, 'operator')} {'stays' if host == 1 else 'stay'} on the host"
        say(f"{stay}; `exir-lower plan` with the same arguments shows why.")


def _list_written(target: Path, artifact: Artifact, values: Mapping[str, Any]) -> str:
    written = [f"Constant methods: {', '.join(f'{name}={value!r}' for name, value in values.items())}."] * bool(values)
    written += [f"{describe_written(path)}." for path in (target, target.with_suffix(".debug.json"))]
    for name, data in artifact.data_files.items():
        written.append(f"Wrote {target.parent / name} ({format_size(len(data))}).")
    return "\n".join(written)


# -- constant methods: those that are given, and those that ExecuTorch's language-model runner reads -------------------

_RUNNER = "ExecuTorch's TextLLMRunner"
_TOKENS, _TOKENS_AND_START = [(False, 2)], [(False, 2), (False, 1)]
_LOGITS = [(True, 2)], [(True, 3)]


def _add_constants(command: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    command.add_argument(
        "--constant",
        metavar="NAME[:TYPE]=VALUE",
        action="append",
        default=[],
        dest="constants",
        help="add a method that returns a value, such as get_max_seq_len=64, use_kv_cache=true or get_eos_ids=[1,2]; "
        "give TYPE (int, float, bool or str) if the value looks like another type; repeatable",
    )
    command.add_argument(
        "--runner-metadata",
        action="store_true",
        help=f"add the metadata methods that {_RUNNER} reads, such as get_vocab_size, with values from the program; "
        "--constant adds those that the program does not have, such as get_eos_ids, and takes precedence",
    )


def read_constants(arguments: argparse.Namespace, methods: Collection[str]) -> dict[str, Any]:
    """Return the values that are given, before anything slow; InputError if one is invalid."""
    constants: dict[str, Any] = {}
    for given in arguments.constants:
        name, equals, text = given.partition("=")
        name, colon, kind = name.partition(":")
        if not name.isidentifier() or not equals or (colon and kind not in _TYPES):
            raise InputError(
                f"--constant {given!r}: expected NAME=VALUE, such as get_max_seq_len=64, or NAME:TYPE=VALUE, where "
                f"TYPE is {', '.join(_TYPES)}."
            )
        if name in methods or name in constants:
            raise InputError(f"--constant {given!r}: there is a method {name!r} already. Choose another name.")
        try:
            constants[name] = _check(_TYPES[kind](text) if colon else _guess(text))
        except (ValueError, KeyError, RecursionError) as error:
            raise InputError(
                f"--constant {given!r}: {text!r} is no {kind or 'value'} that a method can return. Expected a number "
                "of at most 64 bits, true, false, a string, or a list of one of these, such as [1,2]."
            ) from error
    if arguments.runner_metadata:
        _check_methods(methods)
    return constants


def _check_methods(methods: Collection[str]) -> None:
    if "forward" not in methods:
        problem = f"there are {', '.join(map(repr, methods))}. Give the program as forward=MODEL.pt2"
    elif "decode" in methods:
        problem = (
            "'decode' for every token after the prompt, without the state that 'forward' wrote: it gives each method "
            "separate state. Give 'decode' another name, such as step=MODEL.pt2"
        )
    else:
        return
    raise InputError(f"--runner-metadata: {_RUNNER} calls a method 'forward', and {problem}.")


def add_metadata(constants: Mapping[str, Any], program: ExportedProgram) -> dict[str, Any]:
    """Return the given values, and before them what "forward" in Edge dialect says; InputError if it cannot be run."""
    signature = program.graph_signature
    values: dict[str, Any] = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs: list[Any] = [values.get(str(name)) for name in signature.user_inputs]
    results: list[Any] = [values.get(str(name)) for name in signature.user_outputs]
    if _kinds(inputs) not in (_TOKENS, _TOKENS_AND_START) or _kinds(results) not in _LOGITS:
        raise InputError(
            f"--runner-metadata: {_RUNNER} calls 'forward' with tokens, [1, n] of int64, and their start position, "
            "[1] of int64, and expects logits, [1, n, vocabulary] or [1, vocabulary]; this 'forward' takes "
            f"{_describe(inputs)} and returns {_describe(results)}."
        )
    lengths = list(_cache_lengths(program))
    operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    found = {
        "get_vocab_size": results[0].shape[-1],
        "use_kv_cache": len(inputs) > 1,
        "use_sdpa_with_kv_cache": any("llama" in name and "sdpa" in name for name in operators),
        "enable_dynamic_shape": not isinstance(inputs[0].shape[1], int),
    }
    if lengths:
        found |= dict.fromkeys(("get_max_seq_len", "get_max_context_len"), max(lengths))
        found["get_n_layers"] = len(lengths) // 2
    elif "get_max_seq_len" not in constants:
        raise InputError(
            "--runner-metadata: 'forward' has no key-value cache, so the maximum sequence length is not known. Give "
            "it, such as --constant get_max_seq_len=128."
        )
    return {**found, **constants}


def _kinds(values: list[Any]) -> list[tuple[bool, int]]:
    """Return of each tensor whether it holds numbers with fractions, and its number of dimensions."""
    return [(v.is_floating_point(), v.dim()) if hasattr(v, "dim") else (False, -1) for v in values]


def _describe(values: list[Any]) -> str:
    shown = (f"{[*v.shape]} of {str(v.dtype)[6:]}" if hasattr(v, "dim") else str(v) for v in values)
    return ", ".join(shown) or "nothing"


def _cache_lengths(program: ExportedProgram) -> Iterator[int]:
    """Yield how many tokens each buffer holds of which some are written: its size where what is written is smaller."""
    from exir_lowering.graphs import written_state

    written, buffers = written_state(program), program.graph_signature.inputs_to_buffers
    for node in program.graph.nodes:
        if node.op != "placeholder" or buffers.get(node.name) not in written or node.meta["val"].dim() < 3:
            continue
        sizes = node.meta["val"].shape
        parts = [value.meta["val"].shape for user in node.users for value in user.all_input_nodes if value is not node]
        for part in parts:
            # A size that is not known yet is smaller: to compare it would make it a condition of the program.
            smaller = [size for size, new in zip(sizes, part, strict=False) if not isinstance(new, int) or size != new]
            if len(part) == len(sizes) and len(smaller) == 1:
                yield smaller[0]
                break


def _guess(text: str) -> Any:
    """Return the value that a text looks like: one of JSON, or a text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return json.loads(text)
    except ValueError:
        if text[:1] in ("", "[", "{", '"'):
            raise
        return text


def _check(value: Any) -> Any:
    """Return the value, or raise a ValueError if no method of a file can return it."""
    parts = value if isinstance(value, list) else [value]
    if len({type(part) for part in parts}) != 1 or not all(map(_can_return, parts)):
        raise ValueError
    return value


def _can_return(part: Any) -> bool:
    if isinstance(part, str):
        return "\0" not in part.encode().decode()
    if isinstance(part, float):
        return math.isfinite(part)
    return isinstance(part, int) and -(2**63) <= part < 2**63


def _truth(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


_TYPES: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": _truth, "str": str}
