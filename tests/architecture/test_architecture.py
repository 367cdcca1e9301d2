"""The house rules that a machine can check: who may import whom, how long a module may be, no order from a set."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import cotenant
from bench._house_map import (
    COMMON_OPTIONS,
    MANY_OPTIONS,
    base_to_technique,
    between_techniques,
    circles,
    members_of,
    named,
    options_of,
    technique_of,
    wide_functions,
)
from cotenant import registry
from cotenant.cli.app import app

PACKAGE = Path(cotenant.__file__).parent
MODULES = {
    ".".join(("cotenant", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TECHNIQUES = ("granularity", "layer_blocks", "overlap", "partitions", "placement")
"""Packages of one published system each. `cluster` counts as one, too."""
POLICIES = ("cotenant.policies", *(f"cotenant.techniques.{name}.policy" for name in TECHNIQUES))
PURE = sorted(
    name for name in MODULES if any(f"{name}.".startswith(f"{root}.") for root in ("cotenant.core", *POLICIES))
)
COLUMNS = tuple(f"cotenant.policies.shedding.{name}" for name in ("jobs", "many_jobs"))
"""Of these the modules that know numpy: one names its types; the other computes with columns, loaded when many queries
are inside."""

LAW = (
    ("errors", "fair_share", "files", "gantt", "inner_loop", "linux", "log", "plan_file", "registry", "shortages"),
    ("tabular",),
    ("work",),
    ("types",),
    ("metrics",),
    ("graph",),
    ("core",),
    ("profiles",),
    ("predict",),
    ("policies",),
    ("wire",),
    ("workload",),
    ("config",),
    ("repository",),
    ("trace",),
    ("execute",),
    ("world",),
    ("measure",),
    ("sim",),
    ("serve",),
    ("zoo",),
    ("load",),
    ("report",),
    ("api",),
    ("cli",),
    ("__main__",),
)
"""The floors of the base: a package imports what stands above it in this list, and what stands beside it, never what
stands below. Techniques and the cluster import all of it."""
BASE_TO_TECHNIQUE, CIRCLES, POLICY_MEMBERS, LAUNCH_FIELDS, WIDE_FUNCTIONS = 0, [], 3, 11, 3
"""What is left to mend. These numbers only get smaller."""
NEEDS = {
    technique_of(f"{name}."): tuple(technique_of(f"{each}.") for each in needed)
    for name, needed in registry.NEEDS.items()
}
"""Which other techniques each imports, as the line "Needs:" of its README says."""
NEVER = (
    ("world", "predict"),
    ("policies", "predict"),
    ("sim", "execute"),
    ("serve.engine", "wire.codec_http"),
    ("serve.engine", "wire.codec_grpc"),
    ("serve.engine", "serve.frontend"),
    *((f"techniques.{name}.plan", "execute") for name in TECHNIQUES),
    *((f"techniques.{name}.world", f"techniques.{name}.predict") for name in TECHNIQUES),
    *((f"techniques.{name}.policy", f"techniques.{name}.predict") for name in TECHNIQUES),
    *((f"techniques.{name}.policy", "predict") for name in TECHNIQUES),
)
"""Who does not import whom though the floors would let it: worlds are no beliefs, decisions know no wire."""
PLANS = tuple(f"cotenant.techniques.{name}.plan" for name in TECHNIQUES)
PURE_MAY_IMPORT = (
    "cotenant.core",
    *POLICIES,
    "cotenant.types",
    "cotenant.work",
    "cotenant.errors",
    "cotenant.registry",
    "cotenant.graph.dfg",
    "cotenant.techniques.granularity.joint_plan",
)
IMPURE_STDLIB = {
    "asyncio",
    "concurrent",
    "datetime",
    "io",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "secrets",
    "select",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "uuid",
}
WEB = {"aiohttp", "grpc", "httptools", "prometheus_client", "uvloop", "websockets"}
ACCELERATOR = {"cuda", "cupy", "onnxruntime", "pycuda", "ray", "torch", "tvm"}
LINES = 600
"""Where one class or algorithm needs them; most have a third of that."""


TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def tree(name: str) -> ast.Module:
    return TREES[name]


def imports(name: str) -> Iterator[str]:
    """Every module that a module imports, at any depth of its code; relative imports resolved."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join((*parent, base) if base else parent)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in MODULES else base


def is_within(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def test_the_modules_were_found() -> None:
    assert {"cotenant", "cotenant.core.engine", "cotenant.policies.ordered.edf", "cotenant.sim.driver"} <= set(MODULES)
    assert "cotenant.core.engine" in PURE
    assert "cotenant.policies" in PURE


def broken(known: dict[str, list[str]]) -> list[str]:
    """The imports that break the law, of all that are known by module."""
    floors = {room: number for number, rooms in enumerate(LAW) for room in rooms}
    found = []
    for name, imported in sorted(known.items()):
        for other in sorted(dict.fromkeys(imported)):
            if not is_within(other, ("cotenant",)) or {name, other} & {"cotenant", "cotenant.techniques"}:
                continue
            mine, theirs = technique_of(name), technique_of(other)
            if mine:
                is_denied = bool(theirs) and theirs not in (mine, *NEEDS[mine])
            else:
                is_denied = not theirs and floors[other.split(".")[1]] > floors[name.split(".")[1]]
            is_denied |= any(
                is_within(name, (f"cotenant.{a}",)) and is_within(other, (f"cotenant.{b}",)) for a, b in NEVER
            )
            if is_denied:
                found.append(f"{name} imports {other}")
    return found


def test_no_package_imports_one_that_stands_below_it() -> None:
    known = {name: list(imports(name)) for name in MODULES}
    assert sum(map(len, known.values())) > 1000
    assert broken(known) == []


def test_the_base_names_no_technique_but_in_its_registry() -> None:
    found = [f"{name} names {other}" for name, other in base_to_technique(TREES)]
    assert len(found) == BASE_TO_TECHNIQUE, "\n".join(found)


def test_modules_import_each_other_in_no_circle() -> None:
    """Imports for types alone count, those inside functions do not."""
    assert [len(circle) for circle in circles(TREES)] == CIRCLES


def test_interfaces_do_not_grow() -> None:
    """These numbers only get smaller."""
    assert members_of(TREES["cotenant.core.snapshot"], "Policy") == POLICY_MEMBERS
    assert members_of(TREES["cotenant.core.actions"], "Launch") == LAUNCH_FIELDS
    assert len(dict(wide_functions(TREES))) == WIDE_FUNCTIONS


def test_commands_have_few_options_of_their_own() -> None:
    commands = typer.main.get_command(app)
    sizes = {name: len(found) for name, found in options_of(commands)}
    assert {name: size for name, size in sizes.items() if size > MANY_OPTIONS} == {}
    assert sizes["cotenant plan"] > 5 < sizes["cotenant cluster up"]
    texts: dict[str, list[str]] = {}
    top = commands.commands.values()  # type: ignore[attr-defined]
    for command in (inner for each in top for inner in getattr(each, "commands", {"": each}).values()):
        for each in command.params:
            if not each.hidden:
                texts.setdefault(max(each.opts, key=len), []).append(each.help)
    for name in COMMON_OPTIONS:
        assert len(texts[name]) > 1, f"{name} is an option of one command"
        assert len(set(texts[name])) == 1, f"{name} has several meanings: {texts[name]}"


def test_strings_and_types_count_as_imports() -> None:
    trees = {
        "cotenant.a": ast.parse("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cotenant.b import B"),
        "cotenant.b": ast.parse("OPENER = 'cotenant.techniques.overlap.policy:Overlap'\nfrom cotenant import a"),
        "cotenant.registry": ast.parse("OPENER = 'cotenant.techniques.overlap.policy:Overlap'"),
        "cotenant.techniques.overlap.policy": ast.parse("'cotenant.techniques.placement.plan, a docstring'"),
    }
    assert base_to_technique(trees) == [("cotenant.b", "cotenant.techniques.overlap.policy")]
    assert circles(trees) == [["cotenant.a", "cotenant.b"]]
    assert between_techniques(trees) == set()


def test_no_two_files_of_tests_have_one_name() -> None:
    """Pytest tells them apart by that alone."""
    names = Counter(path.name for path in Path(__file__).resolve().parents[1].rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_every_package_has_a_floor() -> None:
    rooms = {name.split(".")[1] for name in MODULES if name != "cotenant"}
    assert rooms == {"cluster", "techniques", *(room for floor in LAW for room in floor)}
    assert {technique_of(name) for name in MODULES} == {"", "cluster", *TECHNIQUES}


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("cotenant.core.engine", "cotenant.predict.table"),
        ("cotenant.wire.encode", "cotenant.load.http"),
        ("cotenant.world.simulated", "cotenant.predict.table"),
        ("cotenant.serve.engine.driver", "cotenant.serve.frontend.http_app"),
        ("cotenant.techniques.overlap.policy.headroom_control", "cotenant.cluster.types"),
        ("cotenant.techniques.overlap.policy.headroom_control", "cotenant.techniques.overlap.predict.overlap"),
    ],
)
def test_a_broken_law_is_seen(name: str, other: str) -> None:
    assert broken({name: [other]}) == [f"{name} imports {other}"]


def test_core_and_policies_are_pure() -> None:
    for name in PURE:
        for imported in imports(name):
            root = imported.partition(".")[0]
            if root == "cotenant":
                assert is_within(imported, PURE_MAY_IMPORT), f"{name} imports {imported}"
            else:
                allowed = {"msgspec", "numpy"} if name in COLUMNS else {"msgspec"}
                assert root in {*sys.stdlib_module_names, *allowed}, f"{name} imports {imported}"
                assert root not in IMPURE_STDLIB, (
                    f"{name} imports {imported}: clock, threads, I/O, logging and chance come from outside"
                )
        nodes = [node.func for node in ast.walk(tree(name)) if isinstance(node, ast.Call)]
        calls = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert not calls & {"open", "print", "input", "__import__", "eval"}, name


@pytest.mark.parametrize(
    "allowed",
    [
        "cotenant.types",
        "cotenant.work",
        "cotenant.errors",
        "cotenant.graph.dfg",
        "cotenant.techniques.granularity.joint_plan",
    ],
)
def test_what_the_core_may_import_is_pure_itself(allowed: str) -> None:
    for imported in imports(allowed):
        root = imported.partition(".")[0]
        if root == "cotenant":
            assert is_within(imported, PURE_MAY_IMPORT), f"{allowed} imports {imported}"
        else:
            assert root in {*sys.stdlib_module_names, "msgspec"} - IMPURE_STDLIB, f"{allowed} imports {imported}"


# --- sets ------------------------------------------------------------------------------------------------------


def is_set(node: ast.expr) -> bool:
    """Whether an expression is plainly a set."""
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name):
            return node.func.id in {"set", "frozenset"}
        if isinstance(node.func, ast.Attribute):
            return node.func.attr in {"union", "intersection", "difference", "symmetric_difference"}
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.BitXor):
        return is_set(node.left) or is_set(node.right)
    return False


def is_set_annotation(node: ast.expr | None) -> bool:
    base = node.value if isinstance(node, ast.Subscript) else node
    return isinstance(base, ast.Name) and base.id in {"set", "frozenset", "Set", "AbstractSet"}


def iterations_over_sets(module: ast.Module) -> list[int]:
    """Lines that take elements of a set one by one: loops, comprehensions, stars, list(), tuple(), iter() and so on."""
    known = set()
    for node in ast.walk(module):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign) and is_set(node.value):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and (
            is_set_annotation(node.annotation) or (node.value and is_set(node.value))
        ):
            targets = [node.target]
        elif isinstance(node, ast.arg) and is_set_annotation(node.annotation):
            known.add(node.arg)
        for target in targets:
            known |= {
                t.id if isinstance(t, ast.Name) else t.attr for t in [target] if isinstance(t, ast.Name | ast.Attribute)
            }

    def takes_from_set(node: ast.expr) -> bool:
        label = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
        return is_set(node) or label in known

    lines = []
    for node in ast.walk(module):
        if isinstance(node, ast.For) and takes_from_set(node.iter):
            lines.append(node.lineno)
        elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.DictComp | ast.SetComp):
            lines += [node.lineno for made in node.generators if takes_from_set(made.iter)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in {"list", "tuple", "iter", "enumerate", "zip", "map", "next"}:
                lines += [node.lineno for argument in node.args if takes_from_set(argument)]
        elif isinstance(node, ast.Starred) and takes_from_set(node.value):
            lines.append(node.lineno)
    return lines


def test_nothing_iterates_over_a_set() -> None:
    assert {name: lines for name in PURE if (lines := iterations_over_sets(tree(name)))} == {}


@pytest.mark.parametrize(
    "code",
    [
        "for x in {1, 2}: pass",
        "for x in set(y): pass",
        "[x for x in {a for a in b}]",
        "taken: set[int] = make()\nfor x in taken: pass",
        "self.taken = set()\nlist(self.taken)",
        "def f(names: frozenset[str]): return [*names]",
        "for x in set(a) | b: pass",
        "for x in a.union(b): pass",
    ],
)
def test_the_search_for_sets_finds_them(code: str) -> None:
    assert len(iterations_over_sets(ast.parse(code))) == 1


# --- sizes and weights -------------------------------------------------------------------------------------------


def test_no_module_is_long() -> None:
    generated = ("_pb2.py", "_pb2_grpc.py")
    lengths = {
        name: len(path.read_text().splitlines()) for name, path in MODULES.items() if not path.name.endswith(generated)
    }
    assert {name: lines for name, lines in lengths.items() if lines > LINES} == {}


def loaded_after(statement: str) -> set[str]:
    """Top-level packages in sys.modules of a fresh interpreter after a statement."""
    code = f"import sys\nbefore = set(sys.modules)\n{statement}\nprint(*sorted(set(sys.modules) - before))"
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_import_cotenant_is_light() -> None:
    loaded = loaded_after("import cotenant")
    assert "cotenant" in loaded
    assert loaded.isdisjoint({"numpy", "onnx", "google", "msgspec", "rich", "typer", *WEB, *ACCELERATOR})


def test_core_and_policies_load_nothing_heavy() -> None:
    loaded = loaded_after("; ".join(f"import {name}" for name in PURE if name not in COLUMNS))
    assert loaded - {"cotenant", "msgspec", "typing_extensions"} <= set(sys.stdlib_module_names)
    assert loaded.isdisjoint({"asyncio", "socket", "logging", "threading"})


PLANNING = sorted(name for name in MODULES if is_within(name, ("cotenant.sim", *PLANS)))


def test_sim_and_plan_load_no_web_and_no_accelerator_package() -> None:
    assert "cotenant.sim.driver" in PLANNING
    loaded = loaded_after("; ".join(f"import {name}" for name in PLANNING))
    assert "cotenant" in loaded
    assert loaded.isdisjoint(WEB | ACCELERATOR)
    assert not any(is_within(imported, ("cotenant.serve",)) for name in PLANNING for imported in imports(name))


TESTS = Path(__file__).parents[1]


def test_test_modules_share_through_support_alone() -> None:
    """What two of them need stands in tests/support: a module of tests is imported by nobody."""
    found = sorted(TESTS.rglob("*.py"))
    names = {path.stem for path in found if path.name.startswith("test_")}
    assert len(names) > 100
    assert len({path.name for path in found if path.name.startswith("test_")}) == len(names), "two of one name"
    for path in found:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                imported = [node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
                assert not names & set(imported), f"{path.name} imports {imported}"


NOT_OF_THE_BASE = ("architecture", "bench", "cluster", "combined", "deploy", "device", "support", "techniques")
"""Folders of tests that may need techniques."""


def needed_by(path: Path, seen: frozenset[Path] = frozenset()) -> set[str]:
    """The techniques that a file of tests imports or names, by way of tests/support, too."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    names = set(named(module))
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
    found = {technique_of(name) for name in names if name.startswith("cotenant.")} - {""}
    shared = [TESTS / "support" / f"{name}.py" for name in sorted(names) if "." not in name]
    for other in shared:
        if other.exists() and other not in seen:
            found |= needed_by(other, seen | {path, other})
    return found


def test_tests_of_the_base_need_no_technique() -> None:
    """With a technique removed they run; `tests/combined` has what needs several, or all policies."""
    paths = [path for path in sorted(TESTS.rglob("*.py")) if path.relative_to(TESTS).parts[0] not in NOT_OF_THE_BASE]
    assert len(paths) > 100
    found = {str(path.relative_to(TESTS)): sorted(needed) for path in paths if (needed := needed_by(path))}
    assert found == {}
    for technique in TECHNIQUES:
        needs = {technique, *NEEDS[technique]}
        for path in sorted((TESTS / "techniques" / technique).rglob("*.py")):
            assert needed_by(path) <= needs, path
