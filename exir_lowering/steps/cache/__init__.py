"""The cache of results by content: keys, the store on disk, and what a miss says.

The pipeline calls `steps.cached_preprocess`. `canonical` writes a partition in a form that its key is computed from;
nothing in a partition is left out of it unless its backend declares that it does not read it.
"""
