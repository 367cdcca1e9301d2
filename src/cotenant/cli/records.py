"""Records of options: a command takes a dataclass, and typer gets an option for each of its fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def with_records(command: Callable[..., None], **several: Sequence[type[Any]]) -> Callable[..., None]:
    """The command with the fields of its records, annotated for typer, as options in place of the record.

    A parameter with a dataclass as its type is a record. `several` has classes of records by the name of a parameter
    that takes a list with one object of each.
    """
    hints = get_type_hints(command, include_extras=True)
    records: dict[str, Sequence[type[Any]]] = {}
    options = []
    for parameter in inspect.signature(command).parameters.values():
        name, hint = parameter.name, hints[parameter.name]
        if name not in several and not is_dataclass(hint):
            options.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        records[name] = several.get(name, (hint,))
        for kind in records[name]:
            of_kind = get_type_hints(kind, include_extras=True)
            options += [
                inspect.Parameter(
                    each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=of_kind[each.name]
                )
                for each in fields(kind)
                if each.init
            ]

    @wraps(command)
    def called(**values: Any) -> None:
        made = {
            name: [kind(**{each.name: values.pop(each.name) for each in fields(kind) if each.init}) for kind in kinds]
            for name, kinds in records.items()
        }
        command(**values, **{name: found if name in several else found[0] for name, found in made.items()})

    called.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in options}
    return called
