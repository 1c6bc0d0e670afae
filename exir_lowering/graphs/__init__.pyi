from . import (
    collector as collector,
    debug_handles as debug_handles,
    measures as measures,
    operators as operators,
    order as order,
    quotient as quotient,
    ranges as ranges,
    schedule as schedule,
    sources as sources,
    together as together,
    weights as weights,
)
from .copies import (
    LIFTED_ORDER as LIFTED_ORDER,
    copy_graph_module as copy_graph_module,
    copy_program as copy_program,
    copy_signature as copy_signature,
    lifted_inputs as lifted_inputs,
    own_state as own_state,
)
from .operators.names import (
    OUT_OF_SIGHT as OUT_OF_SIGHT,
    argument as argument,
    is_mutating as is_mutating,
    known_operators as known_operators,
    operator_name as operator_name,
    origins as origins,
    target_name as target_name,
)
from .source_lines import (
    generated_name as generated_name,
    module_stack as module_stack,
    modules as modules,
    source_code as source_code,
    source_line as source_line,
    stack as stack,
)
from .walking import (
    DELEGATION_TAG as DELEGATION_TAG,
    OPERAND_LAYOUTS as OPERAND_LAYOUTS,
    NestedGraph as NestedGraph,
    OperandLayout as OperandLayout,
    attribute as attribute,
    delegates as delegates,
    is_delegate_call as is_delegate_call,
    is_getitem as is_getitem,
    is_operator as is_operator,
    nested_graphs as nested_graphs,
    qualified_name as qualified_name,
    staying_nodes as staying_nodes,
    strip_tags as strip_tags,
    walk as walk,
)
