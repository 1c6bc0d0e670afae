from .checks import XnnpackPayloads as XnnpackPayloads
