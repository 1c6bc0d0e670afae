"""The results of backends as data: what JSON can hold, and chunks of bytes. Nothing in it is code, or becomes any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from executorch.exir.backend.backend_details import PreprocessResult

from exir_lowering._upstream.delegates import delegate_info, join_named_data, make_result, split_named_data
from exir_lowering.graphs.debug_handles import as_tuple
from exir_lowering.plugins.backend import PlacedResult

_HANDLES: Mapping[str, Any] = {
    "tuple": tuple, "list": list, "set": set, "frozenset": frozenset, "int": lambda handles: handles[0]
}  # fmt: skip
"""How an entry of a debug handle map names handles."""


class DamagedError(Exception):
    """An entry is not what this version writes."""


def flatten_results(results: Sequence[PreprocessResult]) -> tuple[list[Any], list[bytes]] | None:
    """Turn results into what JSON can hold and the chunks that it refers to by number; None if one has other things."""
    chunks: list[bytes] = []
    values = [_flatten(result, chunks) for result in results]
    return None if None in values else (values, chunks)


def _flatten(result: PreprocessResult, chunks: list[bytes]) -> dict[str, Any] | None:
    data, info = result.data_store_output, delegate_info(result)
    split = None if data is None else split_named_data(data)
    if type(result) not in (PreprocessResult, PlacedResult) or (data is not None and split is None):
        return None
    units = getattr(result, "units", None)
    if not _is_plain(units) or not _is_plain(result.debug_handle_map) or not isinstance(info, (type(None), str, bytes)):
        return None
    value: dict[str, Any] = {"payload": len(chunks), "handles": _pairs(result.debug_handle_map)}
    if units is not None:
        value["units"] = _pairs(units)
    chunks.append(bytes(result.processed_bytes))
    if split is not None:
        buffers, inside, outside = split
        value["data"] = [len(chunks), len(buffers), inside, outside]
        chunks += buffers
    if isinstance(info, bytes):
        value["info"] = len(chunks)
        chunks.append(info)
    elif info is not None:
        value["info"] = info
    return value


def _pairs(table: Mapping[Any, Any] | None) -> list[Any] | None:
    """Turn what names handles by identifiers into what JSON can hold."""
    if table is None:
        return None
    return [[identifier, type(named).__name__, list(as_tuple(named))] for identifier, named in table.items()]


def _is_plain(table: Any) -> bool:
    """Return whether JSON can hold a debug handle map."""
    return table is None or (
        isinstance(table, Mapping)
        and {int, str}.issuperset(map(type, table))
        and _HANDLES.keys() >= {type(named).__name__ for named in table.values()}
        and all({int}.issuperset(map(type, as_tuple(named))) for named in table.values())
    )


def restore_results(values: Any, chunks: Sequence[bytes]) -> list[PreprocessResult]:
    """Turn data back into results; raise DamagedError if it is not what `flatten_results` returned."""
    try:
        if not isinstance(values, list):
            raise DamagedError("no list of results")
        return [_restore(value, chunks) for value in values]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from None


def _restore(value: Mapping[str, Any], chunks: Sequence[bytes]) -> PreprocessResult:
    payload, data = chunks[_count(value["payload"])], None
    table = None if value["handles"] is None else _table(value["handles"])
    if "data" in value:
        first, count, inside, outside = value["data"]
        buffers = chunks[_count(first) :][: _count(count)]
        if len(buffers) != count:
            raise DamagedError("fewer chunks than there is named data")
        data = join_named_data(buffers, inside, outside)
    info = value.get("info")
    if isinstance(info, int):
        info = chunks[_count(info)]
    result = make_result(payload, table, data, info)
    if "units" in value:
        return PlacedResult(**vars(result), units=_table(value["units"]))
    return result


def _table(pairs: Any) -> dict[Any, Any]:
    return {
        _typed(identifier, int, str): _HANDLES[kind]([_typed(handle, int) for handle in handles])
        for identifier, kind, handles in pairs
    }


def _typed(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise DamagedError(f"{str(value)[:80]!r} instead of one of {', '.join(kind.__name__ for kind in kinds)}")
    return value


def _count(value: Any) -> int:
    if _typed(value, int) < 0:
        raise DamagedError("a negative number")
    return int(value)
