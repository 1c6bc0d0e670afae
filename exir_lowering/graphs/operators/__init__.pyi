from . import (
    budget as budget,
    calls as calls,
    checks as checks,
    functions as functions,
    names as names,
    pure as pure,
    purity as purity,
)
