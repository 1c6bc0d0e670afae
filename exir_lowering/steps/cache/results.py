"""The results of backends as data: what JSON can hold, and chunks of bytes. Nothing in it is code, or becomes any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from executorch.exir.backend.backend_details import PreprocessResult

from exir_lowering._upstream.delegates import (
    delegate_info,
    join_named_data,
    make_result,
    split_named_data,
)


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
    handles = _flatten_handles(result.debug_handle_map)
    if type(result) is not PreprocessResult or (data is not None and split is None) or handles == "unknown":
        return None
    if not isinstance(info, (type(None), str, bytes)):
        return None
    value: dict[str, Any] = {"payload": len(chunks), "handles": handles}
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


def _flatten_handles(table: Any) -> Any:
    """Return a debug handle map as pairs, None if there is none, and "unknown" if JSON cannot hold it."""
    if table is None:
        return None
    if type(table) is not dict:
        return "unknown"
    pairs = []
    for identifier, named in table.items():
        many = named if type(named) in (tuple, list) else (named,)
        if type(identifier) not in (int, str) or any(type(handle) is not int for handle in many):
            return "unknown"
        pairs.append([identifier, type(named).__name__, list(many)])
    return pairs


def restore_results(values: Any, chunks: Sequence[bytes]) -> list[PreprocessResult]:
    """Turn data back into results; raise DamagedError if it is not what `flatten_results` returned."""
    try:
        if not isinstance(values, list):
            raise DamagedError("no list of results")
        return [_restore(value, chunks) for value in values]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DamagedError(f"{type(error).__name__}: {error}") from None


def _restore(value: Mapping[str, Any], chunks: Sequence[bytes]) -> PreprocessResult:
    handles = value["handles"]
    table = None if handles is None else {_plain(one[0]): _HANDLES[one[1]](list(map(_int, one[2]))) for one in handles}
    data = None
    if "data" in value:
        first, count, inside, outside = value["data"]
        buffers = chunks[_index(first) :][: _index(count)]
        if len(buffers) != count:
            raise DamagedError("fewer chunks than there is named data")
        data = join_named_data(buffers, inside, outside)
    info = value.get("info")
    if isinstance(info, int):
        info = chunks[_index(info)]
    return make_result(chunks[_index(value["payload"])], table, data, info)


def _index(value: Any) -> int:
    if _int(value) < 0:
        raise DamagedError("a negative number")
    return int(value)


def _int(value: Any) -> int:
    if type(value) is not int:
        raise DamagedError(f"{str(value)[:80]!r} instead of a number")
    return value


def _plain(value: Any) -> int | str:
    if type(value) not in (int, str):
        raise DamagedError(f"{str(value)[:80]!r} instead of an identifier")
    return value  # type: ignore[no-any-return]


_HANDLES: Mapping[str, Any] = {"tuple": tuple, "list": list, "int": lambda handles: handles[0]}
