"""A fuzzer for files: it damages them, loads and runs them in forked children, and tells what became of each.

A mutant is made from a seed alone, so that `reproduce(kind, seed)` makes the one again that a report names. Its digests
would reveal it before anything else looks at it: a mutant is loaded with `verify=False`, or with digests that were
computed anew (`resealed`) and `verify="full"`.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import random
import resource
import select
import signal
import struct
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from exir_lowering import LoweredModule, LoweringError, load
from exir_lowering.plugins.payload import find_checks
from exir_lowering.pte import container, digests, flatbuffer
from exir_lowering.pte.container import read_data, read_pte
from exir_lowering.pte.digests import Seal, SealError, Verify
from exir_lowering.pte.flatbuffer import CorruptError, root
from exir_lowering.pte.format import read_program
from exir_lowering.pte.slots import FlatTensor

SECONDS = 120.0
"""How long one mutant may take, on a machine that does other things too."""
HEADROOM = 3 << 30
"""How much memory a child may take beside what it has."""
INTERESTING = (0, 1, 2, 3, 4, 5, 7, 8, 16, 127, 128, 255, 256, 4096, 0x7FFF, 0xFFFF, 0x10000, 1 << 24, 1 << 30)
INTERESTING += (0x7FFFFFFF, 0x80000000, 0xFFFFFFF0, 0xFFFFFFFE, 0xFFFFFFFF)

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Sample:
    """A program as it is saved: files by their suffixes, and what its methods are called with."""

    files: Files
    inputs: Mapping[str, Sequence[Any]]
    unavailable: str = "error"


@dataclass(frozen=True)
class Kind:
    """A kind of file: samples of it, which suffixes are damaged, and what runs one."""

    name: str
    samples: Sequence[Sample]
    damaged: Sequence[str]
    run: Callable[[Path, Sample, str, Verify], Any]


@dataclass
class Report:
    """What became of mutants, by outcome, and each that did what none may do."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    wrong: list[tuple[str, int]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # seeds that ended the process, or would have taken too much


# -- damage -----------------------------------------------------------------------------------------------------------


def _bits(content: bytearray, chance: random.Random, limit: int) -> None:
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        content[chance.randrange(limit)] ^= 1 << chance.randrange(8)


def _bytes(content: bytearray, chance: random.Random, limit: int) -> None:
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        content[chance.randrange(limit)] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))


def _words(content: bytearray, chance: random.Random, limit: int) -> None:
    """Put other numbers where numbers are: the start of each is a multiple of its size."""
    for _ in range(chance.choice((1, 1, 1, 2))):
        size, code = chance.choice(((2, "<H"), (4, "<I"), (4, "<I"), (8, "<Q")))
        at = chance.randrange(max(limit // size, 1)) * size
        if at + size > len(content):
            continue
        (old,) = struct.unpack_from(code, content, at)
        near = old + chance.choice((-8, -4, -2, -1, 1, 2, 4, 8))
        new = chance.choice((near, near, chance.choice(INTERESTING), chance.choice(INTERESTING) << 32, old << 1, -old))
        struct.pack_into(code, content, at, new % (1 << 8 * size))


def _copied(content: bytearray, chance: random.Random, limit: int) -> None:
    """Put one part of the tables over another: offsets that point elsewhere, fields of other tables."""
    size = chance.choice((2, 4, 4, 8, 16))
    source, target = (chance.randrange(max(limit // 4, 1)) * 4 for _ in range(2))
    part = bytes(content[source : source + size])
    content[target : target + len(part)] = part


def _fields(content: bytearray, chance: random.Random, limit: int) -> None:
    """Put other numbers into fields that the reader reads, or take fields away."""
    numbers, entries = places(bytes(content))
    if entries and chance.random() < 0.15:
        struct.pack_into("<H", content, chance.choice(entries), 0)
    elif numbers:
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            at, size = chance.choice(numbers)
            old = int.from_bytes(content[at : at + size], "little")
            near = old + chance.choice((-8, -4, -2, -1, 1, 2, 4, 8, 16))
            far = chance.choice(
                (chance.choice(INTERESTING), chance.choice(INTERESTING) << 32, old << 1, chance.randrange(40))
            )
            content[at : at + size] = (chance.choice((near, far)) % (1 << 8 * size)).to_bytes(size, "little")


@functools.lru_cache(maxsize=64)
def places(content: bytes) -> tuple[list[tuple[int, int]], list[int]]:
    """Return where a file has the numbers that its reader reads, with their sizes, and where its tables name fields."""
    held = memoryview(content)
    base = _address(held)
    numbers: dict[tuple[int, int], None] = {}
    entries: dict[int, None] = {}

    def unpack(buffer: memoryview, at: int, code: str) -> tuple[Any, ...]:
        found = original(buffer, at, code)
        start, size = _address(buffer) - base + at, struct.calcsize(f"<{code[-1]}")
        caller = sys._getframe(1).f_code.co_name
        if caller in ("number", "numbers", "real"):
            numbers.update(dict.fromkeys((start + size * position, size) for position in range(len(found))))
        elif caller == "_table" and code[-1] == "H" and len(code) > 1:
            entries.update(dict.fromkeys(start + 2 * position for position, entry in enumerate(found) if entry))
        return found

    original, flatbuffer._unpack = flatbuffer._unpack, unpack
    try:
        with suppress(CorruptError):
            read_data(held) if content[4:8] == b"FT01" else read_program(held, find_checks)
    finally:
        flatbuffer._unpack = original
    return list(numbers), list(entries)


def _address(buffer: memoryview) -> int:
    return int(numpy.frombuffer(buffer, dtype=numpy.uint8).ctypes.data) if len(buffer) else 0


def _range(content: bytearray, chance: random.Random, limit: int) -> None:
    start = chance.randrange(limit)
    end = min(start + chance.choice((2, 4, 16, 64, 256)), limit)
    part = content[start:end]
    how = chance.randrange(4)
    if how == 0:
        content[start:end] = bytes([chance.choice((0, 255, chance.randrange(256)))]) * len(part)
    elif how == 1:
        chance.shuffle(part)
        content[start:end] = part
    elif how == 2:
        del content[start:end]
    else:
        content[start:start] = chance.randbytes(len(part))


def _cut(content: bytearray, chance: random.Random, limit: int) -> None:
    del content[chance.randrange(chance.choice((limit, len(content)))) :]


def _damage(content: bytes, other: bytes, chance: random.Random) -> bytes:
    """Return the content, damaged in one way: mostly in its tables, where there are some."""
    damaged = bytearray(content)
    limit = len(damaged)
    if content[4:8] in (b"ET12", b"FT01") and chance.random() < 0.6:
        _fields(damaged, chance, limit)
        return bytes(damaged)
    if content[4:8] in (b"ET12", b"FT01") and chance.random() < 0.85:
        with suppress(CorruptError):  # it was damaged before
            limit = read_pte(memoryview(content)).tables if content[4:8] == b"ET12" else min(limit, 4096)
    elif content[4:8] == b"ET12" and b"XH00" in content and chance.random() < 0.8:
        return _payload(damaged, chance)
    how = chance.random()
    if how < 0.06:
        at = chance.randrange(len(damaged))
        return bytes(damaged[:at]) + other[at:] if chance.random() < 0.5 else other[:at] + bytes(damaged[at:])
    chosen = (_bits, _bytes, _words, _words, _words, _copied, _range, _cut)
    chosen[min(int((how - 0.06) / 0.94 * len(chosen)), len(chosen) - 1)](damaged, chance, limit)
    return bytes(damaged)


def _payload(content: bytearray, chance: random.Random) -> bytes:
    """Damage the tables of one of the payloads for XNNPACK."""
    places = [at for at in range(4, len(content), 4) if content[at : at + 4] == b"XH00"]
    start = chance.choice(places) - 4
    first, size = struct.unpack_from("<II", content.ljust(start + 18, b"\0"), start + 10)
    begin, end = start + chance.choice((0, first, first, first, first, first)), start + first + size
    part = bytearray(content[begin:end] or b"\0")
    chance.choice((_bits, _bytes, _words, _words, _words, _copied))(part, chance, len(part))
    return bytes(content[:begin] + part + content[end:])


def mutant(kind: Kind, seed: int) -> tuple[Sample, dict[str, bytes]]:
    """Return a sample of a kind, and its files after damage."""
    chance = random.Random(f"{kind.name} {seed}")
    sample = chance.choice(kind.samples)
    files = dict(sample.files)
    suffix = chance.choice([one for one in kind.damaged if one in files])
    other = chance.choice(kind.samples).files.get(suffix, files[suffix])
    for _ in range(chance.choice((1, 1, 1, 2))):
        if files[suffix]:
            files[suffix] = _damage(files[suffix], other, chance)
    return sample, files


def resealed(files: Files) -> dict[str, bytes]:
    """Return files with digests that fit what they hold, where these can be read: as one who forges files has them."""
    changed: dict[str, str] = {}
    made = {
        suffix: _reseal_data(content, changed) if suffix == ".ptd" else content for suffix, content in files.items()
    }
    return {suffix: _reseal(content, changed) if suffix == ".pte" else content for suffix, content in made.items()}


def _reseal(content: bytes, changed: Mapping[str, str]) -> bytes:
    """Compute the digests of a `.pte` file anew; `changed` are those of its data files, new ones by old ones."""
    held = memoryview(content)
    try:
        _, found = container.open_program(held)
        sealed = bytes(found.named.get(digests.KEY, b""))
        old = digests.decode(sealed)
        base, parts = digests._parts(held)
        ends = [base + start for start, _ in parts]
        of = [digests.digest_of(held[start:end]) for start, end in itertools.pairwise(ends)]
        data = {name: changed.get(digest, digest) for name, digest in old.data.items()}
        new = Seal(digests.digest_of(held[:base]), tuple(of), data).encode()
    except (CorruptError, SealError):
        return content
    at = content.rfind(sealed)
    return content[:at] + new + content[at + len(sealed) :] if len(new) == len(sealed) else content


def _reseal_data(content: bytes, changed: dict[str, str]) -> bytes:
    """Compute the digests of a `.ptd` file anew, and note its new own digest by its old one."""
    held = memoryview(content)
    try:
        named = {name: weight.content for name, weight in read_data(held).items()}
        own = digests.find_data_digest(named)
        listed = bytes(named[digests.data_key(own or "")])
        expected = digests.decode_segments(listed)
        extent = container.read_ptd(held)
        ranges = container.segment_ranges(root(held[: extent.tables]).tables(FlatTensor.SEGMENTS))
        parts = [held[extent.base + offset :][:size] for offset, size in ranges]
        new = digests.encode_segments(map(digests.digest_of, parts[: len(expected)]))
        if own is None or len(new) != len(listed):
            return content
        again = digests.data_digest(held[: extent.base], own, new)
    except (CorruptError, SealError, KeyError):
        return content
    changed[own] = again
    at = content.rfind(listed)
    return (content[:at] + new + content[at + len(listed) :]).replace(own.encode(), again.encode())


# -- running ----------------------------------------------------------------------------------------------------------


def run_program(path: Path, sample: Sample, verify: Verify) -> Any:
    """Load a `.pte` file and run its methods, on inputs of the kinds that it asks for."""
    data = path.with_suffix(".ptd")
    source = path.read_bytes() if len(sample.files) == 1 else path
    given = data if data.exists() else None
    program = load(source, data=given, unavailable=sample.unavailable, verify=verify)
    results: dict[str, Any] = {}
    for name in program.method_names:
        given = sample.inputs.get(name, ())
        try:
            results[name] = [program.run(name, *given) for _ in range(2)]
        except LoweringError:
            asked = _asked(program, name)
            if asked is None:
                raise
            program.run(name, *asked)
            results[name] = "other inputs"
    return results


def _asked(program: Any, name: str) -> list[Any] | None:
    """Return inputs of the kinds that a method asks for; None when they would be very large."""
    inputs: list[Any] = []
    for value in program._file.methods[name].inputs:
        plan = value.content
        if hasattr(plan, "sizes"):
            if plan.sizes and torch.Size(plan.sizes).numel() > 1 << 20:
                return None
            inputs.append(torch.zeros(plan.sizes, dtype=plan.dtype))
        else:
            inputs.append(plan)
    return inputs


def run_debugged(path: Path, sample: Sample, verify: Verify) -> Any:
    """Load a file with its debug information, and tell the times of its lines."""
    program = load(path, debug=path.with_suffix(".debug.json"), verify=verify)
    shown = []
    for name, inputs in sample.inputs.items():
        shown.append(len(str(program.profile(name, *inputs))) > 0)
        shown.append(program.run(name, *inputs))
    return shown


def run_module(path: Path, sample: Sample, verify: Verify) -> Any:
    """Load a saved module, and call it."""
    module = LoweredModule.load(path, verify=verify)
    results: list[Any] = [module.method_names]
    for name, inputs in sample.inputs.items():
        results.append(module.method(name)(*inputs))
    return results


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if first.dtype != second.dtype or first.shape != second.shape:
            return False
        return torch.allclose(first, second, rtol=1e-4, atol=1e-5, equal_nan=True)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    return type(first) is type(second) and first == second


def attempt(kind: Kind, seed: int, folder: Path, expected: Mapping[int, Any], verify: Verify, reseal: bool) -> str:
    """Load and run a mutant; return what became of it."""
    sample, files = mutant(kind, seed)
    if reseal:
        files = resealed(files)
    for suffix, content in files.items():
        (folder / "model.x").with_suffix(suffix).write_bytes(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = kind.run(folder / "model.pte", sample, verify)
    except LoweringError as error:
        if len(str(error)) < 40:
            return f"foreign: a message of {str(error)!r}"
        return "unsealed" if "digest" in str(error) else "refused"
    except MemoryError:
        return "memory"
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"foreign: {type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:200]}"
    # What was put together of two files may be one of them.
    return "same" if any(_same(got, one) for one in expected.values()) else "wrong"


def _limits() -> None:
    """Bound the memory of this process, and be the first to be ended where memory runs out."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    size = pages * resource.getpagesize() + HEADROOM
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _child(kind: Kind, seeds: Sequence[int], verify: Verify, reseal: bool, pipe: int) -> None:
    """Run mutants one after the other, and tell of each before and after."""
    null = os.open(os.devnull, os.O_WRONLY)
    log = os.open(os.environ.get("EXIR_LOWERING_FUZZ_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(null, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    say = os.fdopen(pipe, "w", buffering=1)
    with tempfile.TemporaryDirectory(prefix="fuzz") as name:
        folder = Path(name)
        expected = {}
        for number, sample in enumerate(kind.samples):
            for suffix, content in sample.files.items():
                (folder / "model.x").with_suffix(suffix).write_bytes(content)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected[number] = kind.run(folder / "model.pte", sample, False)
        for old in folder.iterdir():
            old.unlink()
        _limits()
        for seed in seeds:
            say.write(json.dumps([seed, "starts"]) + "\n")
            outcome = attempt(kind, seed, folder, expected, verify, reseal)
            for old in folder.iterdir():
                old.unlink()
            say.write(json.dumps([seed, outcome]) + "\n")
        gc.collect()
    say.write(json.dumps([-1, "ends"]) + "\n")


def _messages(pipe: int, seconds: float) -> Iterator[tuple[int, str]]:
    """Yield what a child says; stop at its end, or when it says nothing for too long."""
    rest = b""
    while select.select([pipe], [], [], seconds)[0]:
        read = os.read(pipe, 1 << 16)
        if not read:
            return
        *lines, rest = (rest + read).split(b"\n")
        for line in lines:
            number, what = json.loads(line)
            yield number, what
    yield -2, "hang"


def _batch(
    kind: Kind, seeds: Sequence[int], verify: Verify, reseal: bool, seconds: float
) -> tuple[dict[int, str], str, int]:
    """Run mutants in one child; return outcomes, how the child ended ("" if well), and the mutant it was at."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reads)
            _child(kind, seeds, verify, reseal, writes)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writes)
    outcomes: dict[int, str] = {}
    at, end = -3, "death"
    try:
        for number, what in _messages(reads, seconds):
            if number == -1:
                end = ""
            elif number == -2:
                end = "hang"
                os.kill(pid, signal.SIGKILL)
                break
            elif what == "starts":
                at = number
            else:
                outcomes[number] = what
    finally:
        os.close(reads)
        _, status = os.waitpid(pid, 0)
    if end == "death":
        end = f"death ({status})"
    return outcomes, end, at


def fuzz(
    kind: Kind,
    seeds: Sequence[int],
    *,
    verify: Verify = False,
    reseal: bool = False,
    seconds: float = SECONDS,
    batch: int = 50,
) -> Report:
    """Run mutants of a kind, and report; `reseal` computes their digests anew."""
    report, rest = Report(), list(seeds)
    while rest:
        outcomes, end, at = _batch(kind, rest[:batch], verify, reseal, seconds)
        if end and at == -3:
            report.failures.append(f"{kind.name}: the undamaged file ended the process: {end}")
            return report
        if end:
            outcomes[at] = end
        for seed, outcome in outcomes.items():
            what = outcome.partition(":")[0].partition(" ")[0]
            report.counts[what] += 1
            if what == "wrong":
                report.wrong.append((kind.name, seed))
            elif what in ("death", "hang", "memory"):
                report.ended.append(seed)
            elif what not in ("same", "refused", "unsealed"):
                report.failures.append(f"{kind.name}: seed {seed}: {outcome}")
        rest = [seed for seed in rest if seed not in outcomes]
    return report


def reproduce(kind: Kind, seed: int, folder: Path) -> None:
    """Write a mutant's files into a folder, and load and run it in this process."""
    sample, files = mutant(kind, seed)
    for suffix, content in files.items():
        (folder / "model.x").with_suffix(suffix).write_bytes(content)
    print(kind.run(folder / "model.pte", sample, False))
