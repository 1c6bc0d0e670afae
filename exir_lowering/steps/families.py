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
    if partitioners is not None:
        raise InputError("lower: got partitioners and variants; each variant names its own partitioners.")
    if not isinstance(variants, Mapping) or not variants:
        raise InputError(
            f"variants: got {variants!r}, expected a mapping from names to partitioners, such as "
            '{"npu": [npu, "xnnpack"], "cpu": "xnnpack"}.'
        )
    for name in variants:
        if not isinstance(name, str) or not name.isprintable() or not name or not set(name).isdisjoint(" @=/"):
            raise InputError(
                f'variants: got the name {name!r}, expected one such as "npu", which is put behind those of methods: '
                'forward@npu. It has no spaces, "@", "=" or "/".'
            )
    return dict(variants)


def check_families(methods: Collection[str], constant_methods: Collection[str]) -> None:
    """Check the names of methods that belong to families; raise an InputError for one that nothing could choose."""
    for name in methods:
        family, tags = manifest.split(name)
        if tags and not (family and all(tags)):
            raise InputError(f"programs: got the method name {name!r}, expected a name and tags, such as forward@int8.")
        for other in (family, manifest.METHOD) if tags else ():
            if other in methods or other in constant_methods:
                raise InputError(f"programs: beside {name!r}, {other!r} names its family or the manifest. Rename one.")


def describe_families(programs: Mapping[str, ExportedProgram], buckets: Mapping[str, Any]) -> dict[str, str]:
    """Return the constant method that is the manifest of lowered programs, by its name; {} if none is in a family."""
    lines = []
    for name, program in programs.items():
        if not manifest.split(name)[0]:
            continue
        found = (getattr(owner, target).backend_id for _, owner, target in graphs.delegates(program.graph_module))
        lines.append(Line(name, tuple(dict.fromkeys(found)), buckets[name] or Bucket()))
        for backend in lines[-1].backends:
            if not backend.isprintable() or " " in backend:
                raise InputError(
                    f"Method {name!r} is for the backend {backend!r}: ids in a manifest have no spaces. Rename it."
                )
    return {manifest.METHOD: manifest.encode(lines)} if lines else {}
