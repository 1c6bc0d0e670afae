from .difference import Difference as Difference, compare as compare
from .reading import inspect as inspect
from .report import FileReport as FileReport
