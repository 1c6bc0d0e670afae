from . import budget as budget, calls as calls, checks as checks, names as names, pure as pure, purity as purity
