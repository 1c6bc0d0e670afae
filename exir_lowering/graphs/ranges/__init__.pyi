from .analysis import ValueRanges as ValueRanges, bound_together as bound_together
from .intervals import BOUND as BOUND, TOP as TOP, Doubt as Doubt, Range as Range
