from .analysis import ValueRanges as ValueRanges
from .assumptions import FINITE_BOUND as FINITE_BOUND, PROPERTIES as PROPERTIES
from .values import BOUND as BOUND, TOP as TOP, Doubt as Doubt, Range as Range
