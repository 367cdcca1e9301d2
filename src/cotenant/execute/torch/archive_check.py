"""Checks of the description of a torch.export archive: pure checks of its JSON, before torch reads any of it.

torch evaluates parts of that description as Python: sizes are expressions, node names become source code, operators are
found by their dotted path. So every value that torch uses must match an allow list. Values that torch does not need
(traces, guards, container types) are left out.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cotenant.graph.torch_names import input_names, output_names

Names = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of a program's inputs and of its outputs."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PATH = re.compile(r"[A-Za-z0-9_.]{1,1000}", re.ASCII)
_OPERATOR = re.compile(r"torch\.ops\.(aten|prims|torchvision)(\.[A-Za-z_][A-Za-z0-9_]*){1,2}", re.ASCII)
_HIGHER_ORDER = frozenset(f"torch.ops.higher_order.{name}" for name in ("cond", "wrap_with_set_grad_enabled"))
_PYTHON = frozenset(
    f"{module}.{name}"
    for module, names in (
        ("_operator", "getitem add sub mul floordiv mod neg pow truediv eq ne lt le gt ge and_ or_ not_"),
        ("math", "ceil floor trunc sqrt"),
        ("torch", "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum"),
    )
    for name in names.split(" ")
)
_REFUSED_OPERATORS = frozenset(("from_file", "save", "warn", "set_data", "_import_py_func"))
"""Operators of aten that use files, or change more than tensors."""

_TOKEN = re.compile(
    r"""\s+ | [(),=+*/%<>!&|~-] | '(?:(?:s|u|z|f|zf|zuf|uf)?[0-9]{1,20}(?:\.[0-9]{1,40})?)'
    | (?P<word>[A-Za-z_][A-Za-z0-9_]*) | [0-9]{1,20}(?:\.[0-9]{1,20})?""",
    re.ASCII | re.VERBOSE,
)
"""A token of an expression as torch writes it, for example `Mul(Integer(2), Symbol('s7', integer=True))`."""
_MOST_CHARACTERS = 4000
_SYMBOL = re.compile(r"(s|u|z|f|zf|zuf|uf)[0-9]+", re.ASCII)
_WORDS = frozenset(
    word
    for line in (
        "Abs Add And CeilDiv CeilToInt CleanDiv Eq Equality False Float FloatPow FloatTrueDiv FloorDiv FloorToInt Ge",
        "GreaterThan Gt Half IntTrueDiv Integer LShift Le LessThan Lt Max Min Mod ModularIndexing Mul Ne NegativeOne",
        "Not One Or Piecewise Pow PowByNatural PythonMod RShift Rational RoundDecimal RoundToInt StrictGreaterThan",
        "StrictLessThan Symbol ToFloat True TruncToFloat TruncToInt Unequality Where Zero ceiling false floor int_oo",
        "integer nonnegative nonzero oo positive precision real true",
    )
    for word in line.split()
)
_DEVICES = frozenset(("cpu", "cuda"))
_KEPT = ("opset_version", "range_constraints", "schema_version", "torch_version")
_INPUTS = frozenset(("user_input", "parameter", "buffer", "tensor_constant"))


class UnsafeArchiveError(ValueError):
    """The description has a value that is not on the allow list. The message is a clause: "it ..."."""


def clean_program(document: Any) -> tuple[dict[str, Any], Names]:
    """Check the description of a program; return the part that torch needs, and the names of inputs and outputs.

    Raises UnsafeArchiveError for values that are not on the allow list. Raises LookupError, TypeError or ValueError for
    a document of another structure.
    """
    module = document["graph_module"]
    signature = module["signature"]
    _check_signature(signature)
    outputs = len(signature["output_specs"])
    given = [spec["user_input"]["arg"] for spec in signature["input_specs"] if "user_input" in spec]
    if not all("as_tensor" in argument for argument in given):
        raise UnsafeArchiveError("it takes an input that is no tensor")
    placeholders = [argument["as_tensor"]["name"] for argument in given]
    inputs = len(placeholders)
    clean = {key: document[key] for key in _KEPT if key in document}
    for symbol in clean.get("range_constraints", {}):
        check_expression(symbol)
    call = {"inputs": [], "outputs": [], "in_spec": _flat(inputs), "out_spec": _tuple(outputs)}
    clean["graph_module"] = {
        "graph": _clean_graph(module["graph"]),
        "signature": signature,
        "module_call_graph": [{"fqn": "", "signature": {**call, "forward_arg_names": None}}],
        "metadata": {},
        "treespec_namedtuple_fields": {},
    }
    clean["verifiers"] = [name for name in document.get("verifiers", []) if name in ("TRAINING", "ATEN")]
    clean["guards_code"] = []
    _check_values(clean["graph_module"])
    return clean, _names(module["module_call_graph"], placeholders, outputs)


def check_expression(text: object) -> None:
    """Raise UnsafeArchiveError unless the text is plain arithmetic of sizes: torch evaluates it."""
    shown = str(text)[:60]
    if not isinstance(text, str) or not 0 < len(text) <= _MOST_CHARACTERS:
        raise UnsafeArchiveError(f"it has a size that is no expression: {shown!r}")
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise UnsafeArchiveError(f"it has a size that is no plain arithmetic: {shown!r}")
        word = token["word"]
        if word is not None and word not in _WORDS and not _SYMBOL.fullmatch(word):
            raise UnsafeArchiveError(f"it has a size with the unknown word {word!r} in it")
        at = token.end()


def check_target(target: object) -> None:
    """Raise UnsafeArchiveError unless the target is an operator on the allow list."""
    if isinstance(target, str):
        if target in _PYTHON or target in _HIGHER_ORDER:
            return
        if _OPERATOR.fullmatch(target) and target.split(".")[3] not in _REFUSED_OPERATORS and "__" not in target:
            return
    raise UnsafeArchiveError(f"it has an operator that is not allowed: {str(target)[:80]!r}")


def check_name(name: object) -> None:
    """Raise UnsafeArchiveError unless the name is an identifier: it becomes one in the source code of segments."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UnsafeArchiveError(f"it has a value with a name that is no identifier: {str(name)[:60]!r}")


def check_fqn(name: object) -> None:
    """Raise UnsafeArchiveError unless the name of a weight is a path of identifiers and numbers."""
    if not isinstance(name, str) or not _PATH.fullmatch(name):
        raise UnsafeArchiveError(f"it has a weight with an invalid name: {str(name)[:60]!r}")


def _check_signature(signature: Any) -> None:
    for spec in signature["input_specs"]:
        kind = next(iter(spec))
        if kind != "user_input":
            check_fqn(next((value for key, value in spec[kind].items() if key.endswith("_name")), ""))
        if kind not in _INPUTS:
            raise UnsafeArchiveError(f"it has an input of the kind {kind!r}; only tensors can be given to it")
    for spec in signature["output_specs"]:
        kind = next(iter(spec))
        if kind != "user_output":
            raise UnsafeArchiveError(
                f"it changes its own state or its inputs when it runs ({kind}); queries would affect each other"
            )


def _clean_graph(graph: Any) -> dict[str, Any]:
    if graph.get("custom_obj_values"):
        raise UnsafeArchiveError("it has custom objects, which are pickled")
    nodes = []
    for node in graph["nodes"]:
        check_target(node["target"])
        nodes.append({**{key: node[key] for key in node if key != "metadata"}, "metadata": {}})
    for kind in ("tensor_values", "sym_int_values", "sym_bool_values", "sym_float_values"):
        for name in graph.get(kind) or {}:
            check_name(name)
    return {**graph, "nodes": nodes}


def _check_values(value: Any) -> None:
    """Check all values that torch interprets, recursively."""
    if isinstance(value, list):
        for item in value:
            _check_values(item)
        return
    if not isinstance(value, Mapping):
        return
    for key, item in value.items():
        if key == "expr_str":
            check_expression(item)
        elif key in ("name", "as_name") and item not in ("", None):
            check_name(item)
        elif key == "target":
            check_target(item)
        elif key == "metadata" and item:
            raise UnsafeArchiveError("it has metadata at its nodes")
        elif key in ("as_custom_obj", "as_operator", "custom_obj", "token"):
            raise UnsafeArchiveError(f"it has a value of the kind {key!r}, which cannot be checked")
        elif key == "as_graph":
            item = {**item, "graph": _clean_graph(item["graph"])}
            value[key] = item  # type: ignore[index]
            _check_values(item)
        elif (key == "device" and isinstance(item, Mapping)) or key == "as_device":
            if item.get("type") not in _DEVICES:
                raise UnsafeArchiveError(f"it was exported for the device {item.get('type')!r}, expected cpu or cuda")
        else:
            _check_values(item)


def _names(module_call_graph: Any, placeholders: Sequence[str], outputs: int) -> Names:
    root: Any = next((entry for entry in module_call_graph if entry.get("fqn") == ""), {})
    signature = root.get("signature") or {}
    inputs = input_names(signature.get("in_spec", ""), signature.get("forward_arg_names"), placeholders)
    return inputs, output_names(signature.get("out_spec", ""), outputs)


def _tuple(count: int) -> str:
    return json.dumps([1, _tuple_of(count)])


def _flat(count: int) -> str:
    none = {"type": "builtins.dict", "context": "[]", "children_spec": []}
    both = [_tuple_of(count), none]
    return json.dumps([1, {"type": "builtins.tuple", "context": "null", "children_spec": both}])


def _tuple_of(count: int) -> dict[str, Any]:
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    return {"type": "builtins.tuple", "context": "null", "children_spec": [leaf] * count}
