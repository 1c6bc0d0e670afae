from .lowering_plan import LoweringPlan as LoweringPlan
from .page import to_html as to_html
from .planned import (
    HostNode as HostNode,
    LiveTensor as LiveTensor,
    MethodPlan as MethodPlan,
    PlannedMemory as PlannedMemory,
    PlannedNode as PlannedNode,
    PlannedPartition as PlannedPartition,
    RefusedMerge as RefusedMerge,
)
from .report import Report as Report
from .views import to_dot as to_dot, to_json as to_json, to_text as to_text
