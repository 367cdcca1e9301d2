"""Quick construction of frozen dataclasses.

The generated `__init__` of a frozen dataclass calls `object.__setattr__` once a field, which makes a launch of twelve
fields five times as dear as a mutable one; a decision makes half a dozen such objects.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type[Any])


def quick_init(cls: _Class) -> _Class:
    """Give a frozen, slotted dataclass an `__init__` that fills the object while it is of a mutable twin class.

    Signature, defaults and immutability stay as they are. Raises TypeError for a class with `__post_init__` or fields
    that are not arguments, because the generated code would skip them.
    """
    arguments = fields(cls)
    if hasattr(cls, "__post_init__") or any(not field.init or field.kw_only for field in arguments):
        raise TypeError(f"{cls.__name__} needs the __init__ that dataclass generated")
    names = [field.name for field in arguments]
    scope: dict[str, Any] = {
        "twin": type(cls.__name__, (), {"__slots__": tuple(names)}),
        "cls": cls,
        "become": object.__dict__["__class__"].__set__,
    }
    signature = []
    body = ["become(self, twin)"]
    for field in arguments:
        name = value = field.name
        if field.default_factory is not MISSING:
            scope |= {f"default_{name}": MISSING, f"make_{name}": field.default_factory, "MISSING": MISSING}
            value = f"make_{name}() if {name} is MISSING else {name}"
        else:
            scope[f"default_{name}"] = field.default
        is_needed = scope[f"default_{name}"] is MISSING and field.default_factory is MISSING
        signature.append(name if is_needed else f"{name}=default_{name}")
        body.append(f"self.{name} = {value}")
    body.append("self.__class__ = cls")
    exec(f"def __init__(self, {', '.join(signature)}):\n    " + "\n    ".join(body), scope)
    scope["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
    cls.__init__ = scope["__init__"]
    return cls
