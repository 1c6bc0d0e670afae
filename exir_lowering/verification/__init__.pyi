from .checking import verify as verify
from .results import MethodResult as MethodResult, OutputResult as OutputResult, Verification as Verification
