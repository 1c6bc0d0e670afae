"""The arguments that decide where operators go: partitioners with their options, rules, and compile specs.

    -p [METHOD=]NAME[:OPTION=VALUE,...]                      an installed partitioner
    -p [METHOD=]package.module:FACTORY[:OPTION=VALUE,...]    one of a module, which is imported
    -p [METHOD=]path/to/file.py:FACTORY[:OPTION=VALUE,...]   one of a file, which is executed
    --variant NAME=PARTITIONER,...                           several such, for a variant
    --allow | --deny | --pin CRITERION=NAME,...              the rules of `exir_lowering.partitioners`

Text before an equals sign is a method if it has no colon or slash. Text between two colons is a factory if it has no
equals sign, and otherwise options. A value is JSON, or text without quotation marks; repeating a name makes a list.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from exir_lowering.cli.output import find_file
from exir_lowering.errors import InputError, LoweringError, PluginLoadError, did_you_mean, let_through

if TYPE_CHECKING:
    from exir_lowering.partitioners import Rule
    from exir_lowering.plugins import CompileSpec, Partitioner

_FILE = re.compile(r"(.+?\.py)(?=:|$)(.*)", re.DOTALL)
_NAMES = ("op", "name", "module", "module_class")
_CRITERIA: Mapping[str, tuple[str, ...]] = {
    "allow": (*_NAMES, "to", "required", "method"),
    "deny": (*_NAMES, "required", "method"),
    "pin": (*_NAMES, "to", "compile_specs", "required", "method"),
}
_SPECS = ("compile_spec", "compile_specs")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    command.add_argument(
        "-p",
        "--partitioner",
        action="append",
        default=[],
        metavar="[METHOD=]NAME[:OPTION=VALUE,...]",
        help="the partitioner, which chooses the operators that a backend takes: an installed one (`exir-lower "
        "plugins` lists them), package.module:FACTORY or ./file.py:FACTORY, with options, for one method or all; "
        "repeatable: each gets what the ones before it left; without any, everything stays on the host",
    )
    for kind, does in (
        ("allow", "give operators to the backend even if the partitioner leaves them"),
        ("deny", "keep operators on the host"),
        ("pin", "fix where operators go: to=BACKEND or to=host"),
    ):
        command.add_argument(
            f"--{kind}",
            action=AppendRule,
            default=[],
            dest="rules",
            metavar="CRITERION=NAME,...",
            help=f"{does}; the first rule that matches an operator decides; criteria: {', '.join(_CRITERIA[kind])}",
        )


class AppendRule(argparse.Action):
    """Keeps the rules of all three options in their order, each as its kind and its criteria."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        """Keep one."""
        kind = self.option_strings[0].removeprefix("--")
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest, None) or ()), f"{kind} {values}"])


# -- texts -------------------------------------------------------------------------------------------------------------


def read_pairs(who: str, text: str) -> list[tuple[str, str]]:
    """Return the names and values of `NAME=VALUE,...`, values as they stand there; InputError for another form."""
    pairs = []
    for part in _split(who, text):
        name, equals, value = part.partition("=")
        if not equals or not name.strip().isidentifier():
            raise InputError(
                f"{who}: got {part!r}, expected NAME=VALUE with commas between them. Several values of one name are "
                "NAME=[A,B], or NAME=A,NAME=B."
            )
        pairs.append((name.strip(), value.strip()))
    return pairs


def _split(who: str, text: str) -> Iterator[str]:
    """Yield what is between commas, except those in brackets and quotation marks."""
    begun, closing, quoted, skip = 0, [], False, False
    for index, letter in enumerate(text):
        if quoted:
            quoted, skip = skip or letter != '"', letter == "\\" and not skip
        elif letter == '"':
            quoted = True
        elif letter in "[{":
            closing.append("]" if letter == "[" else "}")
        elif letter in "]}":
            if not closing or letter != closing.pop():
                raise InputError(f"{who}: there is no bracket for the {letter!r} in {text!r}.")
        elif letter == "," and not closing:
            yield text[begun:index]
            begun = index + 1
    if quoted or closing:
        missing = '"' if quoted else closing[-1]
        raise InputError(f"{who}: {text!r} ends without {missing!r}. Quote it in the shell, such as '...'.")
    yield text[begun:]


def read_value(who: str, text: str) -> Any:
    """Return the value that a text stands for: one of JSON, or with texts that have no quotation marks."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if text[:1] == "[" and text[-1:] == "]":
        return [read_value(who, part.strip()) for part in _split(who, text[1:-1])]
    if text[:1] == "{" and text[-1:] == "}":
        return {name: read_value(who, value) for name, value in _items(who, text)}
    return text


def _read_names(who: str, text: str) -> list[str]:
    """Return names, which may look like numbers: those in brackets, or the only one."""
    parts = _split(who, text[1:-1]) if text[:1] == "[" and text[-1:] == "]" else [text]
    return [part.strip().strip('"') for part in parts]


def _items(who: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and values of `{KEY:VALUE,...}`."""
    for part in _split(who, text[1:-1]):
        key, sign, value = part.partition(":")
        if not sign or not key.strip():
            raise InputError(f"{who}: got {part!r} in {text!r}, expected {{KEY:VALUE,...}}.")
        yield key.strip().strip('"'), value.strip()


def read_specs(who: str, text: str) -> list[CompileSpec]:
    """Return the compile specs of `{KEY:VALUE,...}`: values as UTF-8, or the content of a file for `@FILE`."""
    from exir_lowering.plugins import CompileSpec

    if not (text[:1] == "{" and text[-1:] == "}"):
        raise InputError(f"{who}: got {text!r}, expected compile specs such as {{device:CPU}} or {{table:@FILE}}.")
    return [
        CompileSpec(key, find_file(value[1:]).read_bytes() if value[:1] == "@" else value.strip('"').encode())
        for key, value in _items(who, text)
    ]


# -- partitioners ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GivenPartitioner:
    """A partitioner as it was given."""

    who: str  # how messages begin
    method: str  # the method that it is for, "" for all
    place: str  # the name of an installed one, a module, or a file
    factory: str  # what makes it, of a module or a file, whose code making it runs; "" for an installed one
    options: Sequence[tuple[str, str]] = ()
    variant: str = ""


def read_partitioner(text: str) -> GivenPartitioner:
    """Read the argument of `-p`; nothing is imported. InputError if it has another form."""
    who = f"-p {text!r}"
    head, equals, rest = text.partition("=")
    method, rest = (head, rest) if equals and not {":", "/"} & set(head) else ("", text)
    found = _FILE.fullmatch(rest)
    place, colon, tail = (found[1], found[2][:1], found[2][1:]) if found else rest.partition(":")
    if (equals and not head) or not place or (colon and not tail):
        raise InputError(f"{who}: expected [METHOD=]NAME[:OPTION=VALUE,...], such as xnnpack:per_op_mode=true.")
    first, colon, after = tail.partition(":")
    factory, options = (first, after) if first and "=" not in first else ("", tail)
    if factory and (not all(part.isidentifier() for part in factory.split(".")) or (colon and not after)):
        raise InputError(f"{who}: got {tail!r} after {place!r}, expected OPTION=VALUE, or the name of a factory.")
    if found and not factory:
        raise InputError(f"{who}: expected the name of what makes the partitioner, such as {place}:MyPartitioner.")
    return GivenPartitioner(who, method, place, factory, tuple(read_pairs(who, options)) if options else ())


def read_variant(text: str) -> tuple[str, list[GivenPartitioner]]:
    """Read the argument of `--variant` as `read_partitioner` does; return the variant, and its partitioners."""
    name, equals, rest = text.partition("=")
    if not equals or not name:
        raise InputError(f"--variant {text!r}: expected NAME=PARTITIONER,..., such as npu=mine,xnnpack.")
    parts: list[str] = []
    for part in _split(f"--variant {text!r}", rest) if rest else ():
        if parts and "=" in part.partition(":")[0]:  # one more option of the partitioner before
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return name, [replace(read_partitioner(part), who=f"--variant {text!r}", variant=name) for part in parts]


def _make(given: GivenPartitioner, files: dict[str, ModuleType]) -> Partitioner:
    """Make a partitioner, or raise an error of how it is given or loaded; files are kept, so each is executed once."""
    from exir_lowering.plugins import Partitioner, registry

    factory = _find_factory(given, files) if given.factory else registry.load(registry.PARTITIONERS, given.place)
    made = factory if isinstance(factory, Partitioner) and not given.options else _call(given, factory)
    if not isinstance(made, Partitioner):
        raise InputError(
            f"{given.who}: it makes a {type(made).__name__}, expected an ExecuTorch Partitioner. Name a Partitioner "
            "class, or a function that returns one."
        )
    return made


def _call(given: GivenPartitioner, factory: Any) -> Any:
    if not callable(factory):
        raise InputError(f"{given.who}: {factory!r} cannot be called with options.")
    options = _check_options(given, factory)
    try:
        return factory(**options)
    except LoweringError as error:
        raise InputError(f"{given.who}: {error}") from error
    except Exception as error:
        let_through(error)
        raise PluginLoadError(
            f"{given.who}: calling {_name(factory)} raised {type(error).__name__}: {error}"
        ) from error


def _check_options(given: GivenPartitioner, factory: Any) -> dict[str, Any]:
    """Return the options by name, checked against the parameters of what takes them."""
    texts: dict[str, list[str]] = {}
    for name, text in given.options:
        texts.setdefault(name, []).append(text)
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        parameters = [inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)]
    named = {one.name: one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    if not any(one.kind is one.VAR_KEYWORD for one in parameters):
        for name in texts:
            if name not in named:
                raise InputError(f"{given.who}: {_name(factory)} has no option {name!r}.{_suggest(name, named)}")
    missing = [name for name, one in named.items() if one.default is one.empty and name not in texts]
    if missing:
        wanted = ",".join(f"{name}=..." for name in missing)
        raise InputError(f"{given.who}: {_name(factory)} needs {' and '.join(missing)}. Add :{wanted}")
    return {
        name: read_specs(given.who, many[0])
        if name in _SPECS and len(many) == 1 and many[0][:1] == "{"
        else [read_value(given.who, text) for text in many]
        if len(many) > 1
        else read_value(given.who, many[0])
        for name, many in texts.items()
    }


def _find_factory(given: GivenPartitioner, files: dict[str, ModuleType]) -> Any:
    """Import the module or execute the file, and return what makes the partitioner."""
    found: Any = files.get(given.place)
    if found is None:
        found = files[given.place] = _execute(given) if given.place.endswith(".py") else _import(given)
    for part in given.factory.split("."):
        if not hasattr(found, part):
            names = [name for name in vars(found) if not name.startswith("_")]
            raise InputError(f"{given.who}: {given.place} has no {given.factory!r}.{_suggest(part, names)}")
        found = getattr(found, part)
    return found


def _import(given: GivenPartitioner) -> ModuleType:
    """Import a module, in the working folder too, after everything that is installed."""
    from exir_lowering.plugins import registry

    folder = os.getcwd()
    sys.path.append(folder)
    try:
        return importlib.import_module(given.place)
    except Exception as error:
        let_through(error)
        lacks = isinstance(error, ModuleNotFoundError) and given.place.startswith(error.name or "?")
        if lacks and given.place in registry.known_ids(registry.PARTITIONERS):
            raise InputError(
                f"{given.who}: got {given.factory!r} as an option of {given.place!r}, expected OPTION=VALUE, such as "
                f"{given.place}:{given.factory}=true."
            ) from error
        raise PluginLoadError(
            f"{given.who}: the module {given.place!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    finally:
        # The last one: there may have been another one in front.
        del sys.path[len(sys.path) - 1 - sys.path[::-1].index(folder)]


def _execute(given: GivenPartitioner) -> ModuleType:
    """Execute a file as a module of its own, which what is in it finds by name."""
    path = find_file(given.place)
    name = f"exir_lower_{re.sub(r'[^0-9a-zA-Z]', '_', str(path.resolve()))}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginLoadError(f"{given.who}: {given.place!r} cannot be executed as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        let_through(error)
        del sys.modules[name]
        raise PluginLoadError(f"{given.who}: executing it raised {type(error).__name__}: {error}") from error
    return module


def _name(factory: Any) -> str:
    return getattr(factory, "__qualname__", repr(factory))


def _suggest(wanted: str, known: Collection[str]) -> str:
    return did_you_mean(wanted, known, f" It has {', '.join(map(repr, known)) or 'none'}.", most=3)


# -- rules, and both together ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GivenRule:
    """A rule as it was given."""

    who: str  # how messages begin
    kind: str  # "allow", "deny" or "pin"
    methods: tuple[str, ...]  # those that it is for, () for all
    criteria: Mapping[str, Any]  # the arguments of the function that makes it, compile specs as texts


def _read_rule(given: str) -> GivenRule:
    kind, _, text = given.partition(" ")
    who = f"--{kind} {text!r}"
    found: dict[str, list[str]] = {}
    for name, value in read_pairs(who, text):
        if name not in _CRITERIA[kind]:
            raise InputError(f"{who}: there is no criterion {name!r}.{_suggest(name, _CRITERIA[kind])}")
        found.setdefault(name, []).extend([value] if name == "compile_specs" else _read_names(who, value))
    methods = tuple(found.pop("method", ()))
    criteria: dict[str, Any] = {name: found[name] for name in _NAMES if name in found}
    for name in ("to", "required", "compile_specs"):
        if name in found:
            if len(found[name]) > 1:
                raise InputError(f"{who}: {name} is given twice.")
            criteria[name] = found[name][0]
    if "required" in criteria:
        if criteria["required"].lower() not in ("true", "false"):
            raise InputError(f"{who}: required={criteria['required']}: expected true or false.")
        criteria["required"] = criteria["required"].lower() == "true"
    if kind == "pin" and "to" not in criteria:
        raise InputError(f"{who}: expected to=BACKEND or to=host, such as --pin to=host,op=aten.add.")
    return GivenRule(who, kind, methods, criteria)


def _make_rule(given: GivenRule) -> Rule:
    from exir_lowering import partitioners

    criteria = dict(given.criteria)
    if "compile_specs" in criteria:
        criteria["compile_specs"] = read_specs(given.who, criteria["compile_specs"])
    make: Any = {"allow": partitioners.allow, "deny": partitioners.deny, "pin": partitioners.pin}[given.kind]
    try:
        rule: Rule = make(**criteria)
    except InputError as error:
        raise InputError(f"{given.who}: {error}") from error
    return rule


@dataclass(frozen=True, slots=True)
class Choice:
    """What decides where operators go, as it was given."""

    methods: tuple[str, ...]
    partitioners: tuple[GivenPartitioner, ...]
    rules: tuple[GivenRule, ...]
    variants: tuple[str, ...]

    def make(self) -> dict[str, Any]:
        """Make the argument `partitioners` or `variants` of `lower`, under the rules. Errors as of `_make`."""
        files: dict[str, ModuleType] = {}
        made = [(given, _make(given, files)) for given in self.partitioners]
        rules = [(given, _make_rule(given)) for given in self.rules]
        found = {name: self._by_method(name, made, rules) for name in self.variants or ("",)}
        return {"variants": found} if self.variants else {"partitioners": found[""]}

    def _by_method(self, variant: str, made: Any, rules: Any) -> dict[str, list[Partitioner]] | None:
        from exir_lowering.partitioners import ChainedPartitioner, RuledPartitioner

        found = {}
        for method in self.methods:
            chosen = [one for given, one in made if given.variant == variant and given.method in ("", method)]
            above = [rule for given, rule in rules if not given.methods or method in given.methods]
            if chosen and above:
                # Each rule is about the whole program, so it stands above all partitioners.
                inner = chosen[0] if len(chosen) == 1 else ChainedPartitioner(*chosen)
                chosen = [RuledPartitioner(inner, *above)]
            if chosen:
                found[method] = chosen
        return found or None


def read_choice(arguments: argparse.Namespace, methods: Collection[str]) -> Choice:
    """Read the arguments, before anything slow; InputError if one is wrong, or names a method that there is not."""
    variants = [read_variant(text) for text in getattr(arguments, "variant", ())]
    if variants and arguments.partitioner:
        raise InputError("--variant: it takes the place of -p; name the partitioners of each variant.")
    partitioners = (*map(read_partitioner, arguments.partitioner), *(one for _, given in variants for one in given))
    rules = tuple(map(_read_rule, arguments.rules))
    for who, names in [
        *((given.who, [given.method] if given.method else []) for given in partitioners),
        *((given.who, given.methods) for given in rules),
    ]:
        for name in names:
            if name not in methods:
                raise InputError(f"{who}: there is no method {name!r}.{_suggest(name, methods)}")
    for rule in rules:
        reached = [one for one in partitioners if not one.method or not rule.methods or one.method in rule.methods]
        if not reached:
            raise InputError(f"{rule.who}: a rule needs a partitioner to apply to, and there is none. Add -p NAME.")
    return Choice(tuple(methods), partitioners, rules, tuple(dict.fromkeys(name for name, _ in variants)))
