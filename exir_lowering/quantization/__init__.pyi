from .quantizing import quantize as quantize
from .results import LayerError as LayerError, OutputError as OutputError, Quantized as Quantized
