"""How errors are worded on the command line, where there are options instead of Python arguments."""

from __future__ import annotations

import re

from exir_lowering.errors import LoweringError

# How messages name arguments of `load` and `emit`, and how the command line does.
_OPTIONS = (
    (re.compile(r'\b(unavailable|engine)="(\w+)"'), r"--\1 \2"),
    (re.compile(r"\bkeep_originals=True\b"), "--keep-originals"),
    (re.compile(r"\bshare_state=False\b"), "--share-state none"),
    (re.compile(r"^share_state:"), "--share-state:"),
    (re.compile(r"^(?:verify: (?=inputs|tolerance)|quantize: (?=recipe|keep|calibration|check))(\w+)\b"), r"--\1"),
    (re.compile(r"^(?:verify|quantize): "), ""),
    (re.compile(r"\bas data=(?=[.;, ])"), "with --data"),
    (
        re.compile(r"Give rules for some methods only to those methods' partitioners, or use required=False"),
        "Add method=NAME to the rule if it is for some methods, or required=false",
    ),
    (re.compile(r"LoweringOptions\(require_coverage=\.\.\.\)"), "--require-coverage"),
    (re.compile(r"LoweringOptions\(require_full=\.\.\.\)"), "--require-full"),
    (re.compile(r"Write to='\.\.\.'"), "Add to=BACKEND to the rule"),
    (re.compile(r"\bverify=False\b"), "--check-digests tie"),
    (re.compile(r"\bemit\(ExecutorchBackendConfig\(do_quant_fusion_and_const_prop=True\)\)"), "--fuse-quantized"),
)
_EDGE_CONFIG = re.compile(r"\bLoweringOptions\(edge_compile_config=EdgeCompileConfig\(([^()]*)\)\)")


def describe(error: Exception) -> str:
    """Describe an error in one paragraph, in the command line's words, and below it its page of the documentation."""
    if isinstance(error, LoweringError):
        text = str(error)
        for argument, option in _OPTIONS:
            text = argument.sub(option, text)
        text = _EDGE_CONFIG.sub(lambda config: _name_edge_options(config[1]), text)
        return "\n".join([text, *getattr(error, "__notes__", ())])
    if isinstance(error, MemoryError):
        return f"there is not enough memory{f': {first_line(error)}' if str(error) else ''}."
    return (
        f"unexpected {type(error).__name__}: {error}. This is a defect of exir-lower, or of what it calls; "
        f"the same command with --debug shows where."
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without the full stop; "no message" when there is none."""
    return (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")


def _name_edge_options(config: str) -> str:
    """Name the options that stand for an EdgeCompileConfig."""
    unchecked = ["--no-edge-check"] if "_check_ir_validity=False" in config else []
    operators = [f"--allow-operator {name}" for name in re.findall(r"torch\.ops\.([\w.]+)", config)]
    return " ".join(unchecked or operators)
