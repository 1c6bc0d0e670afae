"""The steps of the pipeline, one module each."""
