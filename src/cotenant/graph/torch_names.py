"""Names of a program's inputs and outputs, from torch's description of their containers. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def output_names(spec: str, count: int) -> tuple[str, ...]:
    """Names by the keys of the dict that the module returns; else `output`, or `output_0`, `output_1`, ...

    `spec` is torch's JSON for the container of the outputs, "" when unknown.
    """
    names = list(_leaves(_described(spec), "")) if spec else []
    if len(names) != count or len(set(names)) != count:
        names = [""] if count == 1 else [str(position) for position in range(count)]
    return tuple("output" if not name else f"output_{name}" if name[0].isdigit() else name for name in names)


def input_names(spec: str, arguments: Sequence[str] | None, placeholders: Sequence[str]) -> tuple[str, ...]:
    """Names by the arguments of the module's `forward`; else the names of the program's placeholders.

    `spec` describes the pair of positional and keyword arguments, `arguments` are the names in `forward`.
    """
    names: list[str] = []
    if spec:
        positional, keywords = _described(spec)["children_spec"]
        given = list(arguments or [])[: len(positional["children_spec"])]
        for name, child in zip(given, positional["children_spec"], strict=False):
            names += _leaves(child, name)
        names += _leaves(keywords, "")
    if len(names) != len(placeholders) or len(set(names)) != len(names) or not all(names):
        return tuple(placeholders)
    return tuple(names)


def _described(spec: str) -> Any:
    described = json.loads(spec)
    return described[1] if isinstance(described, list) else described


def _leaves(spec: Any, prefix: str) -> Iterator[str]:
    if not isinstance(spec, Mapping) or spec.get("type") is None:
        yield prefix
        return
    children = spec["children_spec"]
    keys = _keys(spec.get("context"), len(children))
    for position, child in enumerate(children):
        own = keys[position] if keys else str(position) if len(children) > 1 or prefix else ""
        yield from _leaves(child, f"{prefix}_{own}" if prefix and own else prefix or own)


def _keys(context: Any, count: int) -> list[str] | None:
    """Names of a container's children, if its kind has names; those of a named tuple are in a nested list."""
    try:
        keys = json.loads(context)
    except (TypeError, ValueError):
        return None
    if isinstance(keys, list) and keys and isinstance(keys[0], list):
        keys = keys[0]
    is_named = isinstance(keys, list) and len(keys) == count and all(isinstance(key, str) and key for key in keys)
    return keys if is_named else None
