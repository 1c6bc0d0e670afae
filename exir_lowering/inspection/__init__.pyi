from .reading import inspect as inspect
from .report import FileReport as FileReport
