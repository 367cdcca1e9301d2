"""Locales of text operators: onnxruntime needs the one that the model names, and most containers have none."""

from __future__ import annotations

import onnx

from cotenant.linux import has_locale

_EVERYWHERE = b"C.UTF-8"


def replace_locales(model: onnx.ModelProto) -> tuple[str, ...]:
    """Replace English locales that are not installed by C.UTF-8, in place; the names of the replaced locales.

    The operator `StringNormalizer` uses a locale for upper and lower case alone. glibc's C.UTF-8 has the same tables as
    its English locales. Other languages stay: Turkish, for one, has another lower case of I.
    """
    replaced = []
    for node in model.graph.node:
        locale = next((each for each in node.attribute if each.name == "locale"), None)
        if node.op_type != "StringNormalizer" or (locale is not None and not locale.s.startswith(b"en_")):
            continue
        name = b"en_US.UTF-8" if locale is None else locale.s
        if not has_locale(name) and has_locale(_EVERYWHERE):
            if locale is not None:
                node.attribute.remove(locale)
            node.attribute.append(onnx.helper.make_attribute("locale", _EVERYWHERE))
            replaced.append(name.decode())
    return tuple(dict.fromkeys(replaced))
