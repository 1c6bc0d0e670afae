"""The cache of results by content: keys, and the store on disk. The pipeline calls `steps.cached`."""
