from .analysis import ValueRanges as ValueRanges
from .values import BOUND as BOUND, TOP as TOP, Doubt as Doubt, Range as Range
