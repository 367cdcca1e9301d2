"""What a trace leaves out it can be read without: fields of events and actions that may be unset are so by default."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

import msgspec
import pytest
from msgspec import UNSET, Struct, UnsetType

from cotenant.core import actions, events
from cotenant.core.events import QueryRefused

KINDS = [
    kind
    for module in (events, actions)
    for kind in vars(module).values()
    if isinstance(kind, type)
    and (is_dataclass(kind) or issubclass(kind, Struct))
    and kind.__module__ == module.__name__
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_may_be_unset_is_so_by_default(kind: type) -> None:
    may_be_unset = {name for name, hint in get_type_hints(kind).items() if UnsetType in get_args(hint)}
    if is_dataclass(kind):
        defaults = {each.name: each.default for each in fields(kind)}
    else:
        defaults = {each.name: each.default for each in msgspec.structs.fields(kind)}
    assert {name: defaults[name] for name in may_be_unset if name in defaults} == dict.fromkeys(may_be_unset, UNSET)


def test_there_are_such_fields_and_they_come_back() -> None:
    refused = QueryRefused("a", 5, UNSET, "the queue is full")
    assert msgspec.json.decode(msgspec.json.encode(refused), type=QueryRefused) == refused
    assert len(KINDS) > 20
