"""The programs that `tests/house/fingerprints.py` describes: by name, functions that make and describe each."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge, to_edge_transform_and_lower
from executorch.exir._serialize._program import deserialize_pte_binary
from torch import nn
from torch.export import Dim, export
from torch.nn import functional as F

import exir_lowering
from exir_lowering import LoweringError, LoweringOptions, load, lower, plan, to_backend
from exir_lowering.backends.reference import reference_partitioner

for folder in ("benchmarks", "dynamo", "steps/state"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / folder))

import lowering_models  # noqa: E402
import models  # noqa: E402
import quantized_models  # noqa: E402
import random_programs  # noqa: E402
import random_state_programs  # noqa: E402
import stateful  # noqa: E402

Case = Callable[[], Mapping[str, str]]
OURS = {path.name for path in Path(__file__).parents[1].rglob("*.py")}
KEPT = ("exir_lowering.original/", "exir_lowering.module")  # named data that is more than how a file was made
FIELDS = ("name", "kind", "dtype", "shape", "dim_order", "dynamic", "least", "value", "of", "initial", "shared_with")
KEEP: Path | None = None  # a folder for each text and file that is digested
BENCHMARKS = ("mobilenet_v2", "vit_tiny", "bert_mini", "bert_dynamic", "llama4_decode", "resnet_int8", "qwen2")
KINDS: list[Any] = [None, "xnnpack"]


def digest(content: Any) -> str:
    """Return a short digest of bytes or text."""
    content = content if isinstance(content, bytes) else clean(str(content)).encode()
    found = hashlib.sha256(content).hexdigest()[:16]
    if KEEP is not None:
        (KEEP / found).write_bytes(content)
    return found


def clean(text: str) -> str:
    """Return a text without folders, lines of our tests, addresses and names that count what a process made before."""
    text = re.sub(r"/[^\s'\",:()]*/(?=[^/\s'\",:()]+)", "", text)
    text = re.sub(r'(\w+\.py)(:|", line )\d+', lambda found: found[1] if found[1] in OURS else found[0], text)
    return re.sub(r"<eval_with_key>\.\d+|0x[0-9a-f]{6,}", "<>", text)


def files(artifact: Any) -> dict[str, str]:
    """Return digests of a file, of what is in it but how it was made, of its data files and of what `load` says."""
    content = bytes(artifact.buffer)
    data = {name: bytes(each) for name, each in artifact.data_files.items()}
    return {
        "file": digest(content),
        "program": digest(_program(content)),
        **{f"data {name}": digest(each) for name, each in data.items()},
        "signatures": digest(_signatures(content, list(data.values()))),
        "size": str(len(content)),
    }


def _program(content: bytes) -> str:
    """Return all that is in a file, but not where, and not what it says of how it was made and of its own bytes."""
    read = deserialize_pte_binary(content)
    named = read.named_data
    data = {
        key: (entry.alignment, entry.tensor_layout, _sha(named.buffers[entry.buffer_index]))
        for key, entry in sorted(named.pte_data.items() if named else ())
        if not key.startswith("exir_lowering.") or key.startswith(KEPT)
    }
    for one in read.program.backend_delegate_data:
        one.data = _sha(one.data)
    for one in [*read.program.constant_buffer, *(read.mutable_data or ())]:
        one.storage = _sha(one.storage)
    return f"{read.program}\n{read.mutable_data}\n{data}"


def _sha(content: Any) -> str:
    return hashlib.sha256(bytes(content)).hexdigest()


def _signatures(content: bytes, data: list[bytes]) -> str:
    lines = []
    try:
        methods = load(content, data=data).methods
    except exir_lowering.BackendUnavailableError as error:
        return str(refusal(error))
    for name, method in sorted(methods.items()):
        for kind in ("inputs", "outputs", "state"):
            lines += [f"{name} {kind} {[getattr(one, field, '') for field in FIELDS]}" for one in getattr(method, kind)]
        lines.append(f"{name} on {method.backends}")
    return "\n".join(lines)


def partitions(given: Any) -> dict[str, str]:
    """Return what is delegated in a program: backends and payloads."""
    found = [
        (node.name, node.target, module.backend_id, _sha(module.processed_bytes))
        for node in given.graph.nodes
        if hasattr(module := getattr(given.graph_module, str(node.target), None), "backend_id")
    ]
    return {"delegates": f"{len(found)}: {digest(found)}", "graph": digest(given.graph)}


def program(programs: Any, partitioners: Any, *, edge: bool = False, passes: Any = None, **given: Any) -> Any:
    """Return digests of the plan and of every file, or the message of the error."""
    try:
        options = LoweringOptions(cache=False, **given)
        planned = plan(programs, partitioners, options=options, transform_passes=passes)
        more = {} if edge else {"transform_passes": passes}
        lowered = (to_backend if edge else lower)(programs, partitioners, options=options, **more)
        artifact = lowered.emit()
    except LoweringError as error:
        return refusal(error)
    decided = [
        (method.name, [(one.backend_id, one.nodes) for one in method.partitions], [one.node for one in method.host])
        for method in planned.methods
    ]
    reasons = [(method.name, [(one.operator, one.reason) for one in method.host]) for method in planned.methods]
    text = {"plan": digest(planned), "decided": digest(decided), "reasons": digest(reasons)}
    return {**text, **files(artifact), "debug": digest(artifact.methods)}


def refusal(error: LoweringError) -> dict[str, str]:
    """Return the first line of an error, and a digest of all of it."""
    text = re.sub(r"\b\d+ bytes", "N bytes", clean(str(error)))
    return {"error": f"{type(error).__name__}: {text.splitlines()[0]}", "text": digest(text)}


class Call(nn.Module):
    """A function as a model, with weights of fixed numbers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))
        self.register_buffer("state", torch.arange(4.0))

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def exported(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> Any:
    """Export a function of the model and its inputs; `dynamic`: with first dimensions from 2 to 8."""
    shapes = (tuple({0: Dim("n", min=2, max=8)} for _ in inputs),) if dynamic else None
    return export(Call(function).eval(), inputs, dynamic_shapes=shapes, strict=False)


X = torch.linspace(-2, 2, 16).view(4, 4)
CACHE = {
    "write": lambda m, x: m.state.add_(x.sum(0)) * 1.0 + (x @ m.weight),
    "read": lambda m, x: torch.relu(x @ m.weight) + m.state,
}


def cache_programs() -> dict[str, Any]:
    """Return two methods over one state and one weight."""
    model = Call(lambda m, x: x)
    found = {}
    for name, function in CACHE.items():
        one = Call(function)
        one.weight, one.state = model.weight, model.state
        found[name] = export(one, (X,), strict=False)
    return found


def model_cases() -> dict[str, Case]:
    """Return models: each delegated, on the host, unchanged by rewrites, and through ExecuTorch's Edge dialect."""

    def real(name: str) -> Any:
        return models.exported(name)[2]

    def edge(name: str) -> Mapping[str, str]:
        return program({"forward": to_edge(copy.deepcopy(real(name))).exported_program()}, "xnnpack", edge=True)

    found: dict[str, Case] = {}
    for name in models.MODELS:
        found[name] = lambda name=name: program(real(name), "xnnpack")
        found[f"{name} on the host"] = lambda name=name: program(real(name), None)
        found[f"{name} without rewrites"] = lambda name=name: program(real(name), "xnnpack", rewrites="none")
    for name in ("vit", "bert", "llama"):
        found[f"{name} in Edge dialect"] = partial(edge, name)
    for name in BENCHMARKS:
        found[f"benchmark {name}"] = lambda name=name: program(lowering_models.export_model(name)[0], "xnnpack")
    for dynamic in (False, True):
        found[f"quantized {dynamic}"] = partial(_quantized, dynamic)
    found["quantized on the host"] = lambda: program(quantized_models.quantized(False), None)
    for kind in ("Experts", "Detector", "Recurrent"):
        found[f"wide {kind}"] = partial(_wide, kind)
    for name in ("vit", "bert"):
        found[f"half {name}"] = lambda name=name: program(_half(name), "xnnpack")
    return found


def _quantized(dynamic: bool) -> Mapping[str, str]:
    return program(quantized_models.quantized(dynamic), quantized_models.partitioners(dynamic))


def _wide(kind: str) -> Mapping[str, str]:
    import wide_models

    model, inputs = wide_models.build(getattr(wide_models, kind))
    return program(export(model, inputs), "xnnpack")


def _half(name: str) -> Any:
    model, inputs = models.build(name)
    return export(model.half(), tuple(one.half() if one.is_floating_point() else one for one in inputs))


def random_cases() -> dict[str, Case]:
    """Return random programs in Edge dialect, every fourth with branches or loops, and random state."""

    def edge(seed: int) -> Mapping[str, str]:
        try:
            one = random_programs.random_program(7000 + seed)
        except random_programs.NotExportable:
            return {"not exportable": ""}
        return program(one.methods, KINDS[seed % 2])

    def state(seed: int) -> Mapping[str, str]:
        one = random_state_programs.make(8000 + seed, 1 + seed % 2)
        kinds = [*KINDS, reference_partitioner(own_state=True)]
        return program(stateful.exported(one.models(), dict(one.calls)), kinds[seed % 3])

    return {
        **{f"random {seed}": partial(edge, seed) for seed in range(24)},
        **{f"state {seed}": partial(state, seed) for seed in range(30)},
    }


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "cond": (lambda m, x: torch.cond(x.sum() > 0, lambda v: v @ m.weight + 1, lambda v: v * 3, (x,)), (X,)),
    "layer norm": (lambda m, x: F.layer_norm(x, (4,)), (X.half(),)),
    "group norm": (lambda m, x: F.group_norm(x.view(1, 4, 4), 2), (X,)),
    "sort": (lambda m, x: torch.sort(x, dim=0), (X,)),
    "sort of halves": (lambda m, x: x.sort(-1, descending=True), (X.half(),)),
    "var and std": (lambda m, x: (x.var(0), x.std(1)), (X,)),
    "integers": (lambda m, x: (x // 3, x % 3, x.cumsum(0), x.prod()), (torch.arange(-8, 8).view(4, 4),)),
    "fft": (lambda m, x: torch.fft.rfft(x).abs(), (X,)),
    "linalg": (lambda m, x: torch.linalg.inv(x + 5 * torch.eye(4)), (X,)),
    "pooling": (lambda m, x: F.max_pool2d(x.view(1, 1, 4, 4), 2, return_indices=True), (X,)),
    "scatter": (lambda m, x: x.scatter_reduce(0, torch.zeros(4, 4).long(), x, "amax"), (X,)),
    "nonzero": (lambda m, x: x[x > 0], (X,)),
    "attention": (lambda m, x: F.scaled_dot_product_attention(*[x.view(1, 2, 2, 4)] * 3, is_causal=True), (X,)),
    "scalars": (lambda m, x, n: (x * n, n + 1), (X, 3)),
    "written input": (lambda m, x: x.mul_(2).sum(), (X,)),
    "no tensor": (lambda m, x: (x, None, 3, "a"), (X,)),
}  # fmt: skip

IMAGES: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6()),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False),
    "transposed": lambda: nn.ConvTranspose2d(4, 8, 3, stride=2),
    "grouped": lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Hardswish()),
    "pooled": lambda: nn.Sequential(nn.AvgPool2d(2), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)),
    "upsampled": lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
}


def _image(layer: Callable[[], nn.Module]) -> Mapping[str, str]:
    return program(export(layer().eval(), (torch.linspace(0, 1, 256).view(1, 4, 8, 8),)), "xnnpack")


def function_cases() -> dict[str, Case]:
    """Return small functions on the host and delegated, some of them with dynamic sizes, and kinds of operators."""
    found: dict[str, Case] = {}
    for name, (function, inputs) in FUNCTIONS.items():
        for kind in KINDS:
            found[f"{name} {kind}"] = lambda f=function, i=inputs, k=kind: program(exported(f, *copy.deepcopy(i)), k)
    for name in ("layer norm", "sort", "attention"):
        function = FUNCTIONS[name][0] if name != "attention" else lambda m, x: (x @ x.mT).softmax(-1)
        found[f"dynamic {name}"] = lambda f=function: program(exported(f, X, dynamic=True), "xnnpack")
    for name, layer in IMAGES.items():
        found[f"image {name}"] = partial(_image, layer)
    return found


def feature_cases() -> dict[str, Case]:
    """Return what emission, options and faces do."""
    real = lambda name: models.exported(name)[2]  # noqa: E731
    bert = lambda **given: lower(real("bert"), "xnnpack", options=LoweringOptions(**given))  # noqa: E731
    host = lambda **given: lower(real("llama"), None, options=LoweringOptions(**given))  # noqa: E731
    dynamic = lambda: exported(lambda m, x: torch.relu(x @ m.weight), X, dynamic=True)  # noqa: E731
    whole = lambda: exir_lowering.lower_whole_program(to_edge(real("vit")).exported_program(), "reference")  # noqa: E731
    three = {"xnnpack": "xnnpack", "reference": "reference", "host": None}
    split = lambda key, size: "a" if size > 9000 else None  # noqa: E731
    found: dict[str, Case] = {
        "weights outside": lambda: files(bert().emit(external_weights="weights")),
        "weights outside, on the host": lambda: files(host().emit(external_weights="weights")),
        "weights by a policy": lambda: files(bert().emit(external_weights=split)),
        "keep originals": lambda: files(bert().emit(keep_originals=True)),
        "without provenance": lambda: files(bert().emit(provenance=False)),
        "constant methods": lambda: files(bert().emit(constant_methods={"n": 3, "t": torch.arange(3)})),
        "variants": lambda: files(lower(cache_programs(), variants=three).emit()),
        "buckets": lambda: files(lower(exir_lowering.buckets(dynamic(), {"n": [2, 8]}), "xnnpack").emit()),
        "planner naive": lambda: files(bert(memory_planner="naive").emit()),
        "planner naive on the host": lambda: files(host(memory_planner="naive").emit()),
        "slow": lambda: files(bert(**_slow()).emit()),
        "slow on the host": lambda: files(host(**_slow()).emit()),
        "two jobs": lambda: files(bert(jobs=2).emit()),
        "cache": _cached,
        "debug information": lambda: {"text": _unidentified(bert().emit().debug_info.to_json())},
        "record for the Inspector": lambda: _etrecord(bert()),
        "saved module": _module,
        "calls of a module": _calls,
        "compat": _compat,
        "exporters": _patched,
        "whole program": lambda: {"payload": digest(bytes(whole().processed_bytes))},
        "passes": lambda: program(real("vit"), "xnnpack", passes=[lambda p: p]),
        "inspected": lambda: {"json": digest(exir_lowering.inspect(bert().emit(provenance=False).buffer).to_json())},
        "verified": lambda: {"ok": str(exir_lowering.verify(bert().emit().buffer, real("bert")).ok)},
        "lowered, as text": lambda: {"text": digest(bert())},
    }
    for share in ("auto", True, False, ["state"]):
        for kind in KINDS:
            made = lambda s=share, k=kind: files(lower(cache_programs(), k).emit(share_state=s))  # noqa: E731
            found[f"share state {share} {kind}"] = made
    for backend in ("reference", "echo"):
        found[f"backend {backend}"] = lambda b=backend: program(models.exported("vit")[2], _everything(b))
    for name in ("vit", "llama_with_cache"):
        found[f"compiled {name}"] = partial(_compiled, name)
    found["compiled for training"] = partial(_compiled, "bert", train=True)
    return found


def _slow() -> Mapping[str, Any]:
    old = "edge" in LoweringOptions.__dataclass_fields__
    return {"edge": "executorch", "accelerate": False} if old else {"fast": False}


def _everything(backend: str) -> Any:
    from exir_lowering.partitioners import SupportPartitioner, ops

    taken = ops("aten.addmm.default", "aten.mm.default", "aten.linear.default", "aten.add.Tensor", "aten.mul.Tensor")
    return SupportPartitioner({backend: taken})


def _cached() -> Mapping[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for kind in ("miss", "hit"):
            lowered = lower(models.exported("vit")[2], "xnnpack", options=LoweringOptions(cache=folder))
            uses = [use.hit for use in lowered.report.cache if getattr(use, "kind", "preprocess") == "preprocess"]
            found |= {f"{kind} {key}": value for key, value in files(lowered.emit()).items()}
            found[f"{kind} hits"] = f"{sum(uses)} of {len(uses)}"
        return found


def _etrecord(lowered: Any) -> Mapping[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = lowered.emit(etrecord=True).save(Path(folder) / "model.pte")
        with zipfile.ZipFile(path.with_suffix(".etrecord")) as record:
            found = {name: record.read(name) for name in sorted(record.namelist())}
        return {
            name: digest(text) if name.endswith("_map") else "" for name, text in found.items()
        }  # others have paths


def _module() -> Mapping[str, str]:
    module = lower(models.exported("vit")[2], "xnnpack", options=LoweringOptions(cache=False)).module()
    module.vocabulary = {"a": [1, 2.5, None, torch.arange(3)]}
    with tempfile.TemporaryDirectory() as folder:
        module.save(Path(folder) / "model.pte")
        (debug,) = Path(folder).glob("*.debug.json")
        program, content = _program((Path(folder) / "model.pte").read_bytes()), _unidentified(debug.read_text())
        return {"program": digest(program), "debug": content, "files": str(sorted(map(str, os.listdir(folder))))}


def _unidentified(debug: str) -> str:
    """Return a digest of debug information without what identifies the file, which depends on all of its bytes."""
    return digest({key: value for key, value in json.loads(debug).items() if key != "digest"})


def _calls() -> Mapping[str, str]:
    module, found = lower(cache_programs(), "xnnpack").module(), {}
    for number, (name, x) in enumerate([("write", X), ("read", X), ("write", X * 2), ("read", X)]):
        found[f"{number} {name}"] = str(module.method(name)(x).detach().round(decimals=3).tolist())
    return found


def _compat() -> Mapping[str, str]:
    from exir_lowering import compat

    edge = to_edge(copy.deepcopy(models.exported("vit")[2])).exported_program()
    return partitions(compat.to_backend(edge, XnnpackPartitioner()))


def _patched() -> Mapping[str, str]:
    from exir_lowering import compat

    with compat.patch_executorch():
        made = to_edge_transform_and_lower(copy.deepcopy(models.exported("vit")[2]), partitioner=[XnnpackPartitioner()])
        return {**partitions(made.exported_program()), "file": digest(bytes(made.to_executorch().buffer))}


def _compiled(name: str, train: bool = False) -> Mapping[str, str]:
    import compiled_models

    from exir_lowering import dynamo

    torch._dynamo.reset()
    case = compiled_models.build(name)
    case.model.train(train)
    model = torch.compile(
        case.model, backend=dynamo.backend, dynamic=False, options={"partitioners": "xnnpack", "partitions": "all"}
    )
    if train:
        case.loss(model).backward()
    else:
        with torch.no_grad():
            case.run(model)
    found = {}
    for graph in dynamo.reports():
        for place, (kind, report) in enumerate(graph.reports):
            for method in report.methods:
                taken = [(each.backend_id, *each.nodes) for each in method.partitions]
                found[f"{graph.number} {graph.backend} {kind} {place}"] = f"{len(taken)}: {digest(taken)}"
        found[f"{graph.number} fallbacks"] = digest([(one.attempt, one.instead) for one in graph.fallbacks])
    return found


def error_cases() -> dict[str, Case]:
    """Return mistakes, each with its error."""
    vit = lambda: models.exported("vit")[2]  # noqa: E731
    small = lambda: exported(lambda m, x: torch.sort(torch.relu(x @ m.weight)), X)  # noqa: E731
    file = lambda: lower(small(), "xnnpack").emit().buffer  # noqa: E731
    mistakes: dict[str, Callable[[], Any]] = {
        "no programs": lambda: lower({}),
        "not a program": lambda: lower({"forward": nn.Linear(2, 2)}),
        "a name that is none": lambda: lower({"": vit()}),
        "an unknown partitioner": lambda: lower(vit(), "xnnpak"),
        "an unknown method": lambda: lower({"a": vit()}, {"b": "xnnpack"}),
        "an unknown backend": lambda: exir_lowering.lower_whole_program(vit(), "nothing"),
        "no Edge dialect": lambda: to_backend({"forward": vit()}, "xnnpack"),
        "not enough delegated": lambda: lower(small(), "xnnpack", options=LoweringOptions(require_coverage=1.0)),
        "too much memory": lambda: lower(vit(), "xnnpack", options=LoweringOptions(require_memory="1 KB")),
        "a size that is none": lambda: LoweringOptions(require_memory="many"),
        "an option's value": lambda: LoweringOptions(non_convex="maybe"),
        "an assumption": lambda: LoweringOptions(assume={"x": "good"}),
        "jobs": lambda: LoweringOptions(jobs=0),
        "an unknown rewrite": lambda: lower(vit(), "xnnpack", options=LoweringOptions(rewrites=["nothing"])),
        "no kernel": lambda: lower(exported(lambda m, x: torch.special.zeta(x, x), X)),
        "a bad config": lambda: lower(small()).emit("model.pte"),
        "a policy": lambda: lower(small()).emit(external_weights=lambda key, data: 3),
        "a name twice": lambda: lower(small()).emit(constant_methods={"forward": 3}),
        "a state that is none": lambda: lower(small()).emit(share_state=["other"]),
        "a path": lambda: lower(small()).emit().save("model.bin"),
        "a file that is none": lambda: load(b"nothing"),
        "a path that is none": lambda: load("nowhere/model.pte"),
        "a damaged file": lambda: load(file()[:-100]),
        "an unknown way to run": lambda: load(file()).run("backward", X),
        "too few inputs": lambda: load(file()).run("forward"),
        "a wrong dtype": lambda: load(file()).run("forward", X.long()),
        "a wrong shape": lambda: load(file()).run("forward", X[:2]),
        "weights that are elsewhere": lambda: load(lower(small()).emit(external_weights="w").buffer),
        "a bucket": lambda: exir_lowering.buckets(vit(), {"n": [2]}),
        "a variant": lambda: lower(vit(), variants={"": "xnnpack"}),
        "a backend that raises": lambda: lower(small(), _all_to("broken"), backends={"broken": _Broken}),
        "a backend that returns nothing": lambda: lower(small(), _all_to("empty"), backends={"empty": _Empty}),
        "an attribute of a module": lambda: _unsaved(lower(small()).module()),
        "an argument of bisect": lambda: exir_lowering.bisect(3, "xnnpack"),
    }

    def refused(mistake: Callable[[], Any]) -> Mapping[str, str]:
        try:
            return {"no error": type(mistake()).__name__}
        except LoweringError as error:
            return refusal(error)

    return {f"error: {name}": partial(refused, mistake) for name, mistake in mistakes.items()}


def _unsaved(module: Any) -> None:
    module.other = object()
    module.save("model.pte")


class _Broken(exir_lowering.Backend):
    backend_id = "broken"

    def preprocess(self, program: Any, compile_specs: Any) -> Any:
        raise ArithmeticError("tile does not fit")


class _Empty(_Broken):
    backend_id = "empty"

    def preprocess(self, program: Any, compile_specs: Any) -> Any:
        return None


def _all_to(backend: str) -> Any:
    from exir_lowering.partitioners import SupportPartitioner, everything

    return SupportPartitioner({backend: everything()})


def all_cases() -> dict[str, Case]:
    """Return everything, in order."""
    warnings.simplefilter("ignore")
    return {**model_cases(), **random_cases(), **function_cases(), **feature_cases(), **error_cases()}
