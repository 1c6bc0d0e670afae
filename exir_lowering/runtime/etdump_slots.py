"""The numbers in `etdump_schema_flatcc.fbs`, ExecuTorch's schema of ETDumps: fields of tables, by their names there."""

from __future__ import annotations

from typing import Final


class ETDump:
    """The root of an ETDump's tables."""

    VERSION: Final = 0
    RUN_DATA: Final = 1


class RunData:
    """What was recorded of loading, or of one execution."""

    NAME: Final = 0
    BUNDLED_INPUT_INDEX: Final = 1
    ALLOCATORS: Final = 2
    EVENTS: Final = 3


class Event:
    """Something that was recorded."""

    PROFILE_EVENT: Final = 0
    ALLOCATION_EVENT: Final = 1
    DEBUG_EVENT: Final = 2


class ProfileEvent:
    """How long something took."""

    NAME: Final = 0
    CHAIN_INDEX: Final = 1
    INSTRUCTION_ID: Final = 2
    DELEGATE_DEBUG_ID_INT: Final = 3
    DELEGATE_DEBUG_ID_STR: Final = 4
    DELEGATE_DEBUG_METADATA: Final = 5
    START_TIME: Final = 6
    END_TIME: Final = 7
