"""Families of methods: names such as `forward@npu`, and the manifest that says which methods of a file are in one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.export import ExportedProgram

from exir_lowering import graphs
from exir_lowering.errors import InputError
from exir_lowering.pte import manifest
from exir_lowering.pte.manifest import Bucket, Line


def read_variants(partitioners: Any, variants: Any) -> dict[str, Any]:
    """Return what each variant is lowered for, by its name in order of preference; "" if there are no variants."""
    if variants is None:
        return {"": partitioners}
    expected = 'expected a mapping from names to partitioners, such as {"npu": [npu, "xnnpack"], "cpu": "xnnpack"}.'
    if not isinstance(variants, Mapping) or not variants:
        raise InputError(f"variants: got {variants!r}, {expected}")
    if partitioners is not None:
        raise InputError("lower: got partitioners and variants; each variant names its own partitioners.")
    for name in variants:
        if not isinstance(name, str) or not name.isprintable() or not name or not set(name).isdisjoint(" @=/"):
            raise InputError(
                f'variants: got the name {name!r}, expected a string such as "npu": without spaces, "@", "=" and "/", '
                "as the methods are called forward@npu."
            )
    return dict(variants)


def check_families(methods: Collection[str], constant_methods: Collection[str]) -> None:
    """Check the names of methods that belong to families; raise an InputError for one that nothing could choose."""
    for name in methods:
        family, tags = manifest.split(name)
        if not tags:
            continue
        if not family or not all(tags):
            raise InputError(
                f"programs: got the method name {name!r}, expected a name and tags, such as forward@int8: the methods "
                "of one name are a family, of which the first that can run is chosen."
            )
        for other in (family, manifest.METHOD):
            if other in methods or other in constant_methods:
                what = "the name of its family" if other == family else "made for the families of the file"
                raise InputError(f"programs: there are methods {name!r} and {other!r}, which is {what}. Rename one.")


def read_buckets(programs: Mapping[str, ExportedProgram]) -> dict[str, Bucket]:
    """Return the sizes for which programs were specialised, by method."""
    found = {name: program.graph_module.meta.get(manifest.BUCKET) for name, program in programs.items()}
    return {name: bucket for name, bucket in found.items() if isinstance(bucket, Bucket)}


def describe_families(programs: Mapping[str, ExportedProgram], buckets: Mapping[str, Bucket]) -> dict[str, str]:
    """Return the constant method that is the manifest of lowered programs, by its name; {} if none is in a family."""
    lines = []
    for name, program in programs.items():
        if not manifest.split(name)[0]:
            continue
        found = (getattr(owner, target).backend_id for _, owner, target in graphs.delegates(program.graph_module))
        backends = tuple(dict.fromkeys(found))
        for backend in backends:
            if not backend.isprintable() or " " in backend:
                raise InputError(
                    f"Method {name!r} is for the backend {backend!r}: with spaces or control characters in its id, the "
                    "methods of a family cannot be described. Give the backend another id."
                )
        lines.append(Line(name, backends, buckets.get(name, Bucket())))
    return {manifest.METHOD: manifest.encode(manifest.group(lines))} if lines else {}
