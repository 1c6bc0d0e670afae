"""`exir-lower lower`: exported programs to one `.pte` file, with methods that return a constant."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exir_lowering.cli import largest, llm, partitioning, program_files
from exir_lowering.cli.output import (
    OK,
    check_target,
    check_targets,
    describe_written,
    format_size,
    kept_from_stdout,
    make_console,
    say,
    write_file,
)
from exir_lowering.errors import InputError

if TYPE_CHECKING:
    from exir_lowering.lowered import LoweredMethods
    from exir_lowering.plans.report import Report
    from exir_lowering.steps.emit import Artifact
    from exir_lowering.steps.shared_state import ShareState


EXAMPLES = """\
examples:
  exir-lower lower model.pt2 --partitioner xnnpack -o model.pte
  exir-lower lower model.py:make -p xnnpack -o model.pte
  exir-lower lower bert/ --task text-classification -p xnnpack -o bert.pte
  exir-lower lower --llm qwen/ --quantise 8da4w -o qwen.pte
  exir-lower lower prefill=prefill.pt2 decode=decode.pt2 --partitioner xnnpack -o llm.pte
  exir-lower lower forward=llm.pt2 step=step.pt2 -p xnnpack -o llm.pte --constant get_eos_ids=[1,2]
  exir-lower lower model.pt2 --partitioner mine --partitioner xnnpack -o model.pte --json > report.json
  exir-lower lower model.pt2 -p my_module:partitioner -p xnnpack -o model.pte
  exir-lower lower model.pt2 -p xnnpack --bounds "height*width=1000000" -o model.pte
  exir-lower lower model.pt2 --variant npu=mine,xnnpack --variant cpu=xnnpack -o model.pte

A .pt2 file is made by torch.export.save(torch.export.export(model, inputs), "model.pt2"). The function `make` of
model.py returns `model, inputs`, or `model, (args, kwargs, dynamic_shapes)`. bert/ is a folder of a transformers model.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    program_files.add_arguments(parser)
    program_files.add_variants(parser)
    largest.add(parser, "--sizes")
    llm.add_arguments(parser)
    parser.add_argument("-o", "--output", required=True, metavar="OUT.pte", help="the file to write")
    parser.add_argument("--external-weights", metavar="NAME", help="put weights into NAME.ptd beside the .pte file")
    parser.add_argument("--keep-originals", action="store_true", help="keep the graphs for machines without a backend")
    parser.add_argument(
        "--fuse-quantized",
        action="store_true",
        help="fuse quantized patterns on the host, such as an embedding of quantized weights, into quantized operators",
    )
    add_sharing(parser)
    parser.add_argument(
        "--on-backend-error",
        choices=("raise", "fallback", "split"),
        help="what to do when a backend fails on a partition: end with its error (default, raise); leave its operators "
        "to the next partitioner or the host (fallback); or cut it until those that fail are isolated, and leave those "
        "(split); with raise, an exception of a partitioner's check of an operator ends with its error, too",
    )
    parser.add_argument("--no-provenance", action="store_true", help="store neither how the file was made nor names")
    parser.add_argument(
        "--constant",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        dest="constants",
        help="add a method that returns a value, such as get_max_seq_len=64, use_kv_cache=true or get_eos_ids=[1,2]; a "
        "string that looks like another value is quoted twice: '\"64\"'; repeatable",
    )
    parser.add_argument("--etrecord", action="store_true", help="also write OUT.etrecord, for ExecuTorch's Inspector")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many partitions are lowered at once")
    caching = parser.add_mutually_exclusive_group()
    caching.add_argument("--cache", metavar="FOLDER", help="use the cache in this folder instead of the user's")
    caching.add_argument("--no-cache", action="store_true", help="do not use a cache")
    parser.add_argument(
        "--html", metavar="PLAN.html", help="also write the page of `exir-lower plan`, from the same conversion"
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
    pages = check_targets(html=arguments.html)
    data = arguments.external_weights
    if data is not None and (not data.removesuffix(".ptd") or "/" in data or "\\" in data):
        raise InputError(
            f"--external-weights {data!r}: expected the name of a file beside the .pte file, without a directory, such "
            "as 'weights'."
        )
    values = read_constants(arguments.constants, files)
    llm.check_arguments(arguments, files, target)
    partitioning.check_arguments(arguments)
    with kept_from_stdout(arguments.json):
        cached = False if arguments.no_cache else arguments.cache or True
        options = program_files.make_options(
            arguments, cache=cached, jobs=arguments.jobs, on_backend_error=arguments.on_backend_error
        )
        sizes = largest.read_sizes(arguments.sizes)

        from exir_lowering._upstream.compiler import ExecutorchBackendConfig
        from exir_lowering.pipeline import lower

        chosen = {**partitioning.make(arguments), "sizes": sizes}
        if arguments.llm:
            lowered = llm.lower_folder(Path(files["forward"]), arguments, chosen, options)
        else:
            lowered = lower(program_files.read_programs(files, arguments), **chosen, options=options)
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
    for path in pages.values():
        write_file(path, artifact.report.to_html().encode())
    warn_of_narrowed(lowered.report)
    if arguments.share_state == "auto":
        _warn_of_unshared(artifact)
    if arguments.json:
        print(json.dumps(json.loads(artifact.report.to_json()), indent=2))
    else:
        _print_tables(arguments, lowered, artifact)
    values = {**lowered.constant_methods, **values}
    tokenizer = llm.copy_tokenizer(Path(files["forward"]), target) if arguments.llm else ""
    say(_list_written(target, [*pages.values()], artifact, values) + tokenizer, error=arguments.json)
    return OK


def _read_sharing(text: str) -> ShareState:
    words: dict[str, ShareState] = {"auto": "auto", "all": True, "none": False}
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected auto, all, none or names separated by commas, got {text!r}")
    return words.get(text, names)


def warn_of_narrowed(report: Report) -> None:
    """Say which sizes of an input the conversion did not take into account; programs of files mostly keep theirs."""
    if found := [one for one in report.narrowed if one.given[1] is not None]:  # of the others, `lower` warns
        first, *others = found
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
    host = sum(len(method.host) for method in lowered.report.methods)
    if host:
        from exir_lowering.plans.formatting import many

        stay = f"{many(host, 'operator')} {'stays' if host == 1 else 'stay'} on the host"
        why = "`exir-lower plan` with the same arguments shows why"
        if not (arguments.partitioner or arguments.variant):
            why = "no -p was given, and -p xnnpack is for any CPU"
        say(f"{stay}; {why}.")


def _list_written(target: Path, pages: Sequence[Path], artifact: Artifact, values: Mapping[str, Any]) -> str:
    written = [f"Constant methods: {', '.join(f'{name}={value!r}' for name, value in values.items())}."] * bool(values)
    written += [f"{describe_written(path)}." for path in (target, target.with_suffix(".debug.json"), *pages)]
    for name, data in artifact.data_files.items():
        written.append(f"Wrote {target.parent / name} ({format_size(len(data))}).")
    return "\n".join(written)


def read_constants(given: Sequence[str], methods: Collection[str]) -> dict[str, Any]:
    """Return the values of constant methods, before anything slow; InputError if one is invalid."""
    constants: dict[str, Any] = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not name.isidentifier() or not equals:
            raise InputError(f"--constant {each!r}: expected NAME=VALUE, such as get_max_seq_len=64.")
        if name in methods or name in constants:
            raise InputError(f"--constant {each!r}: there is a method {name!r} already. Choose another name.")
        try:
            constants[name] = _read_value(text)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"--constant {each!r}: {text!r} is no value that a method can return. Expected a number of at most 64 "
                "bits, true, false, a string, or a list of one of these, such as [1,2]."
            ) from error
    return constants


def _read_value(text: str) -> Any:
    """Return the value of JSON, or a text that is none; ValueError if no method of a file can return it."""
    try:
        value = json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        if text[:1] in ("", "[", "{", '"'):
            raise
        value = text
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        known = isinstance(part, str) and "\0" not in part.encode().decode()
        known |= isinstance(part, float) and math.isfinite(part)
        known |= isinstance(part, int) and -(2**63) <= part < 2**63
        if not known:
            raise ValueError
    if len(set(map(type, parts))) != 1:
        raise ValueError
    return value
