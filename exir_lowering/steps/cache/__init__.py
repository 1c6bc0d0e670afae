"""The cache of results by content: keys, the store on disk, and what a miss says.

The pipeline calls `steps.cached`. `keys` writes a partition in the form that its key is
computed from; nothing in it is left out unless its backend declares that it does not read it.
"""
