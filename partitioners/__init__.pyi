from .algorithms.convex import Proposal as Proposal, contract as contract, propose_partitions as propose_partitions
from .algorithms.limits import Limits as Limits
from .by_support import PatternPartitioner as PatternPartitioner, SupportPartitioner as SupportPartitioner
from .chained import ChainedPartitioner as ChainedPartitioner
from .drop_in import convex_proposals as convex_proposals
from .rules import Rule as Rule, RuledPartitioner as RuledPartitioner, allow as allow, deny as deny, pin as pin
from .supports.patterns import Match as Match, Pattern as Pattern, PatternSupport as PatternSupport
from .supports.predicates import (
    argument_values as argument_values,
    constant_arguments as constant_arguments,
    constant_weights as constant_weights,
    dtypes as dtypes,
    everything as everything,
    memory_format as memory_format,
    ops as ops,
    ranks as ranks,
    static_shapes as static_shapes,
)
from .supports.support import GraphScope as GraphScope, No as No, Support as Support, scopes as scopes, where as where
from .supports.templates import ANY as ANY, Constant as Constant, one_of as one_of
from .table import OperatorTable as OperatorTable
