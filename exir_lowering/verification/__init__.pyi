from .bisecting import bisect as bisect
from .checking import verify as verify
from .results import (
    Culprit as Culprit,
    MethodResult as MethodResult,
    OutputResult as OutputResult,
    Suspect as Suspect,
    Verification as Verification,
)
