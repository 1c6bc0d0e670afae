from .bisecting import bisect as bisect
from .checking import verify as verify
from .culprit import Culprit as Culprit, Suspect as Suspect
from .results import MethodResult as MethodResult, OutputResult as OutputResult, Verification as Verification
