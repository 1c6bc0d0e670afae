from .partitioner import xnnpack as xnnpack
