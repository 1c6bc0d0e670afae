"""`exir-lower lower --llm`: the folder of a language model of transformers to a file with its tokenizer beside it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exir_lowering.cli.output import say, write_file
from exir_lowering.errors import InputError

if TYPE_CHECKING:
    from exir_lowering.lowered import LoweredMethods
    from exir_lowering.options import LoweringOptions

_TOKENIZER = "tokenizer.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for language models."""
    parser.add_argument(
        "--llm",
        action="store_true",
        help="MODEL is the folder of a causal language model of transformers: write a file that generates text in "
        "ExecuTorch's TextLLMRunner, and its tokenizer.json beside it; for XNNPACK, unless -p says otherwise",
    )
    parser.add_argument("--max-context", type=int, default=2048, metavar="N", help="with --llm: tokens of the cache")
    parser.add_argument("--quantise", "--quantize", choices=("8da4w", "8da8w"), help="with --llm: 4 or 8 bits a weight")


def check_arguments(arguments: argparse.Namespace, files: Mapping[str, str], target: Path) -> None:
    """Check what goes with --llm, before anything slow; InputError if something does not."""
    if arguments.quantise and not arguments.llm:
        raise InputError("--quantise: it is for the folder of a language model, expected --llm with it.")
    folder = Path(next(iter(files.values())))
    if arguments.llm and ([*files] != ["forward"] or not folder.is_dir()):
        raise InputError(f"--llm: got {', '.join(arguments.models)}, expected the folder of one transformers model.")
    beside, tokenizer = target.with_name(_TOKENIZER), folder / _TOKENIZER
    if arguments.llm and tokenizer.is_file() and beside.exists() and beside.read_bytes() != tokenizer.read_bytes():
        raise InputError(f"-o {str(target)!r}: there is another {_TOKENIZER} beside it. Write to a folder of its own.")


def lower_folder(
    folder: Path, arguments: argparse.Namespace, chosen: Mapping[str, Any], options: LoweringOptions
) -> LoweredMethods:
    """Lower the model of a folder; its weights in float are gone as soon as they are quantised."""
    from exir_lowering.cli.transformers_folder import load_folder
    from exir_lowering.language_models import check_model, export_model
    from exir_lowering.pipeline import lower

    model = load_folder(folder, arguments.task)
    check_model(model, arguments.max_context, arguments.quantise)
    program, constants = export_model(model, arguments.max_context, arguments.quantise)
    given = chosen if arguments.partitioner or arguments.variant else {**chosen, "partitioners": "xnnpack"}
    return replace(lower(program, **given, options=options), constant_methods=constants)


def copy_tokenizer(folder: Path, target: Path) -> str:
    """Copy the tokenizer beside the file, and say what was written; warn where there is none."""
    if (tokenizer := folder / _TOKENIZER).is_file():
        return f"\n{write_file(target.with_name(_TOKENIZER), tokenizer.read_bytes())}."
    why = f"{str(folder)!r} has no {_TOKENIZER}, which ExecuTorch's runner reads"
    say(f"Warning: {why}. transformers' AutoTokenizer writes it by save_pretrained.", error=True)
    return ""
