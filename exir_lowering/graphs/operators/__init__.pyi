from . import (
    functions as functions,
    names as names,
    pure as pure,
    purity as purity,
)
