"""`cotenant plan`: what it answers, that its answers are true, and that its pictures are to scale."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from rich.console import Console

from commands import Run
from cotenant.errors import PlanError
from cotenant.plan_file import sections_text
from cotenant.profiles.device import this_device
from cotenant.profiles.profile_file import ModelProfile, Point, Profile, load_profile, save_profile
from cotenant.report.pictures import PALETTE, keys_of, short
from cotenant.repository import profile_path
from cotenant.techniques.partitions.plan.advice import Advisor, all_loads
from cotenant.techniques.partitions.plan.application import Application, Stage
from cotenant.techniques.partitions.plan.assess import Assessment, assess, violations
from cotenant.techniques.partitions.plan.check import SLO, check_plan
from cotenant.techniques.partitions.plan.elastic import Elastic
from cotenant.techniques.partitions.plan.file import (
    PlanFile,
    Request,
    plan_text,
    read_plan,
    read_request,
    splits_of_cores,
)
from cotenant.techniques.partitions.plan.sources import (
    MOST_BELIEVED,
    ProfileCosts,
    basis_of,
    costs_of_repository,
    read_profile_costs,
)
from cotenant.techniques.partitions.plan.types import (
    DevicePlan,
    DeviceType,
    Infeasible,
    Load,
    PartitionPlan,
    Plan,
    Slot,
)
from cotenant.techniques.partitions.report import columns_of, plan_picture, plan_svg, tenant_table
from cotenant.work import Work
from plan_samples import CPU, GPU, MODELS, MS, costs, latencies, load, models_of, some_devices, some_loads, table_costs
from profile_files import save_current, write_profile
from repositories import scaled, write_model
from section_of_notes import noted

EXAMPLES = Path(__file__).parents[3] / "examples"
ELASTIC = Elastic(with_interference=True, headroom=0.1)

DEVICES = """
[[device]]
name = "gpu"
kind = "gpu"
count = 2
splits = [[100], [20, 80], [40, 60], [50, 50]]
memory_gib = 11
"""


def tenant(name: str, rate: float, slo_ms: float) -> str:
    return f'[[tenant]]\nname = "{name}"\nrate = {rate}\nslo_ms = {slo_ms}\n'


TENANTS = DEVICES + tenant("small", 100, 60) + tenant("middle", 50, 60) + tenant("deep", 40, 250)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file of tenants, and a profile of the GPU that they are for."""
    (tmp_path / "tenants.toml").write_text(TENANTS, encoding="utf-8")
    write_profile(tmp_path / "gpu.json", latencies(GPU.sizes, GPU.whole), "gpu")
    return tmp_path


def test_a_plan_that_is_written_holds(run: Run, folder: Path) -> None:
    out = folder / "plan.toml"
    status, text, err = run("plan", folder / "tenants.toml", "--profiles", folder / "gpu.json", "-o", out, "--quick")
    assert (status, err) == (0, "")
    assert "The tenants fit on 1 of 2 devices" in text
    assert "Checked: the plan passed" in text
    file = read_plan(out)
    tables = read_profile_costs(folder / "gpu.json")
    basis = basis_of({"": tables}, file.request.devices, MODELS)
    assert file.plan.planner == "ours"
    assert file.profile == basis.fingerprint
    assert file.request == read_request(folder / "tenants.toml")
    assert check_plan(file.plan, file.request.loads, file.request.devices, basis.costs) == ()


def test_json_has_the_whole_answer(run: Run, folder: Path) -> None:
    arguments = ("--profiles", folder / "gpu.json", "--planner", "elastic_int", "--json")
    status, text, _ = run("plan", folder / "tenants.toml", *arguments)
    answer = json.loads(text)
    assert status == 0
    assert answer["fits"] is answer["checked"] is True
    assert (answer["devices_there"], answer["devices_used"], answer["least_devices"]) == (2, 1, 1)
    assert [each["tenant"] for each in answer["tenants"]] == ["small", "middle", "deep"]
    assert all(each["slack_ns"] >= 0 and each["planned_per_s"] >= each["rate_per_s"] for each in answer["tenants"])
    assert answer["growth"]["until"] > answer["growth"]["factor"] > 1
    assert answer["first"] == min(answer["tenants"], key=lambda each: each["growth"])["tenant"]


def test_what_does_not_fit_says_what_breaks_and_what_mends_it(run: Run, folder: Path) -> None:
    (folder / "tenants.toml").write_text(DEVICES + tenant("heavy", 400, 100) + tenant("small", 10, 60))
    out = folder / "plan.toml"
    arguments = ("--profiles", folder / "gpu.json", "--planner", "elastic", "-o", out)
    status, text, _ = run("plan", folder / "tenants.toml", *arguments)
    assert status == 1
    assert not out.exists()
    assert "The tenants do not fit on 2 devices" in text
    assert "Tenant 'heavy' breaks first: devices" in text
    assert re.search(r"- \d more 'gpu'", text)
    status, text, _ = run("plan", folder / "tenants.toml", *arguments, "--json")
    answer = json.loads(text)
    assert (status, answer["fits"], answer["broken"]["tenant"]) == (1, False, "heavy")
    assert answer["remedies"][0]["kind"] == "devices"


def test_every_remedy_mends_and_hardly_less_would() -> None:
    request = Request((load("heavy", 400, 100), load("small", 10, 60)), (GPU, GPU))
    believed = costs()
    advisor = Advisor(ELASTIC, request, believed)
    broken = advisor.plan()
    assert isinstance(broken, Infeasible)
    remedies = {remedy.kind: remedy for remedy in advisor.remedies(broken)}
    assert {"devices", "rate", "rates"} <= set(remedies)

    def holds(loads: tuple[Load, ...], devices: int) -> bool:
        return isinstance(ELASTIC.plan(loads, (GPU,) * devices, believed), Plan)

    def mended(share: float, all_rates: bool) -> tuple[Load, ...]:
        return tuple(
            structs.replace(each, rate_per_s=each.rate_per_s * share) if all_rates or each.tenant == "heavy" else each
            for each in request.loads
        )

    more = int(remedies["devices"].value)
    assert holds(request.loads, 2 + more)
    assert not holds(request.loads, 1 + more)
    assert remedies["rate"].name == "heavy"
    for kind, share in (("rate", remedies["rate"].value / 400), ("rates", remedies["rates"].value)):
        assert holds(mended(share, kind == "rates"), 2)
        assert not holds(mended(share * 1.03, kind == "rates"), 2)


def test_a_looser_slo_of_an_application_is_found_where_that_breaks() -> None:
    application = Application("app", 12 * MS, 10, (Stage("first", "small"), Stage("second", "wide", ("first",))))
    request = Request((load("small", 10, 60),), (GPU,), (application,))
    advisor = Advisor(ELASTIC, request, costs())
    broken = advisor.plan()
    assert isinstance(broken, Infeasible)
    (slo,) = [remedy for remedy in advisor.remedies(broken) if remedy.kind == "slo"]
    assert slo.name == "app"
    mended = replace(request, applications=(structs.replace(application, slo_ns=int(slo.value)),))
    assert isinstance(Advisor(ELASTIC, mended, costs()).plan(), Plan)


def test_a_looser_slo_is_found_where_it_is_the_slo_that_breaks() -> None:
    request = Request((load("wide", 10, 12),), (GPU,))
    advisor = Advisor(ELASTIC, request, costs())
    broken = advisor.plan()
    assert isinstance(broken, Infeasible)
    (slo,) = [remedy for remedy in advisor.remedies(broken) if remedy.kind == "slo"]
    assert slo.name == "wide"
    quickest = costs().latency_ns(Work("wide", 0, 1), 100, "gpu")
    assert 2 * quickest <= slo.value <= 2 * quickest * 1.05
    mended = (load("wide", 10, slo.value / MS),)
    assert isinstance(ELASTIC.plan(mended, (GPU,), costs()), Plan)


def test_growth_is_where_the_planner_stops() -> None:
    request = Request((load("middle", 50, 60), load("small", 100, 60)), (GPU,))
    growth = Advisor(ELASTIC, request, costs()).growth()
    assert growth.until is not None
    assert growth.breaks is not None
    assert growth.factor < growth.until < growth.factor * 1.02

    def found(factor: float) -> Plan | Infeasible:
        loads = [structs.replace(each, rate_per_s=each.rate_per_s * factor) for each in request.loads]
        return ELASTIC.plan(loads, request.devices, costs())

    assert isinstance(found(growth.factor), Plan)
    assert found(growth.until) == growth.breaks


@given(some_loads(), some_devices())
def test_slack_is_what_the_checker_means(loads: list[Load], devices: list[DeviceType]) -> None:
    believed = costs()
    plan = ELASTIC.plan(loads, devices, believed)
    if isinstance(plan, Infeasible):
        return
    view = assess(plan, loads, devices, believed, believed)
    assert not violations(plan, loads, devices, believed, 0.1)
    for each in view.tenants:
        assert each.slack_ns >= 0
        assert each.slack_ns == each.tail_slack_ns
        assert each.growth >= each.planned_per_s / each.rate_per_s * (1 - 1e-9) >= 1.1 * (1 - 1e-8)
    assert all(0 < part.load <= 1 for device in view.devices for part in device.partitions)
    first = plan.devices[0]
    slack = min(slot.slack_ns for slot in view.devices[0].partitions[0].slots)
    for more, late in ((slack, False), (slack + 1, True)):
        longer = structs.replace(first.partitions[0], duty_ns=first.partitions[0].duty_ns + more)
        slower = structs.replace(first, partitions=(longer, *first.partitions[1:]))
        found = check_plan(Plan((slower, *plan.devices[1:])), loads, devices, believed)
        assert (SLO in [violation.kind for violation in found]) == late


def test_bursts_are_simulated_and_planned_for(run: Run, folder: Path) -> None:
    # two rows of 9.9 ms each fill the SLO of 20 ms: a third that comes meanwhile is late on one device
    write_profile(folder / "gpu.json", {"small": {100: {1: round(9.9 * MS)}}}, "gpu")
    text = '[[device]]\nname = "gpu"\nkind = "gpu"\ncount = 3\nsplits = [[100]]\n' + tenant("small", 80, 20)
    (folder / "tenants.toml").write_text(text)
    answers = []
    for more in ((), ("--poisson",)):
        arguments = ("--profiles", folder / "gpu.json", "--planner", "elastic", "--quick", *more)
        _, told, _ = run("plan", folder / "tenants.toml", *arguments)
        _, text, _ = run("plan", folder / "tenants.toml", *arguments, "--json")
        answer = json.loads(text)
        (outcome,) = answer["simulated"]["outcomes"]
        assert outcome["offered"] == outcome["in_slo"] + outcome["late"] + outcome["dropped"]
        assert ("plan with --poisson" in told) == (outcome["violation_share"] > 0.01)
        answers.append((answer["devices_used"], outcome["violation_share"], answer["poisson"]))
    (even, missed, _), (bursty, fewer, poisson) = answers
    assert (even, bursty, poisson) == (1, 2, True)
    assert missed > 0.1 > 2 * fewer
    status, _, err = run("plan", folder / "tenants.toml", *arguments, "--headroom", 0.1)
    assert (status, "one of --headroom and --poisson" in err) == (2, True)


# --- checking a plan ---------------------------------------------------------------------------------------------


def test_a_plan_is_checked_against_a_profile(run: Run, folder: Path) -> None:
    out, profile = folder / "plan.toml", folder / "gpu.json"
    run("plan", folder / "tenants.toml", "--profiles", profile, "-o", out, "--quick")
    status, text, _ = run("plan", "--check", out, "--profiles", profile)
    assert status == 0
    assert "The plan holds on 1 of 2 devices" in text
    assert "another profile" not in text
    slower = latencies(GPU.sizes, GPU.whole)
    slower["small"] = {size: {rows: 40 * ns for rows, ns in each.items()} for size, each in slower["small"].items()}
    write_profile(profile, slower, "gpu")
    status, text, _ = run("plan", "--check", out, "--profiles", profile)
    assert status == 1
    assert re.search(r"slo: device 0 partition \d tenant 'small': duty cycle .* exceed the SLO", text)
    assert "made from another profile" in text


def test_every_violation_of_a_plan_is_named(run: Run, folder: Path) -> None:
    out, profile = folder / "plan.toml", folder / "gpu.json"
    run("plan", folder / "tenants.toml", "--profiles", profile, "-o", out, "--quick")
    file = read_plan(out)
    one = PartitionPlan(30, MS, (Slot("small", 1, 100),))
    out.write_text(plan_text(replace(file, plan=Plan((DevicePlan("gpu", (one,)), DevicePlan("tpu", (one,)))))))
    status, text, _ = run("plan", "--check", out, "--profiles", profile, "--json")
    found = json.loads(text)
    assert status == 1
    assert found["holds"] is False
    kinds = [sentence.partition(":")[0] for sentence in found["violations"]]
    assert kinds == ["inventory", "split", "rate", "rate"]
    assert found["violations"][1] == "split: device 0: partitions of 30 are in no split of 'gpu'"


def test_stages_must_not_take_more_than_their_application_has() -> None:
    stages = Stage("one", "small"), Stage("two", "middle", ("one",))
    application = Application("app", 100 * MS, 20, stages)
    request = Request((), (GPU,), (application,))
    loads = all_loads(request, request.devices, costs())
    assert [each.tenant for each in loads] == ["app.one", "app.two"]
    plan = ELASTIC.plan(loads, request.devices, costs())
    assert isinstance(plan, Plan)
    assert violations(plan, loads, (GPU,), costs(), 0.1, (application,)) == ()
    looser = (structs.replace(loads[0], slo_ns=loads[0].slo_ns + 2 * MS), loads[1])
    (found,) = violations(plan, looser, (GPU,), costs(), 0.1, (application,))
    assert found == "stage: application 'app': SLOs of its stages add up to 102 of 100 ms"


def test_an_application_is_planned_by_its_stages_and_judged_as_a_whole(run: Run, folder: Path) -> None:
    application = '[[application]]\nname = "app"\nrate = 20\nslo_ms = 150\n'
    stages = [f'[[application.stage]]\nname = "{name}"\nmodel = "{name}"\n' for name in ("small", "middle")]
    (folder / "tenants.toml").write_text(DEVICES + application + "".join(stages) + 'after = ["small"]\n')
    out = folder / "plan.toml"
    arguments = (
        folder / "tenants.toml",
        "--profiles",
        folder / "gpu.json",
        "--planner",
        "elastic",
        "--quick",
        "-o",
        out,
    )
    status, text, _ = run("plan", *arguments)
    assert status == 0
    assert "Application 'app' as a whole misses" in text
    file = read_plan(out)
    assert [load.tenant for load in file.request.loads] == ["app.small", "app.middle"]
    assert sum(load.slo_ns for load in file.request.loads) <= 150 * MS
    assert run("plan", "--check", out, "--profiles", folder / "gpu.json")[0] == 0
    answer = json.loads(run("plan", *arguments, "--json")[1])
    assert [each["name"] for each in answer["simulated"]["outcomes"]] == ["app"]


# --- what is wrong on the command line ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", "gpu=x"), "'x' is not a number of devices"),
        (("--devices", "tpu=1"), "device 'tpu' is not in the file, which has gpu"),
        (
            ("--planner", "best"),
            "planner is 'best', expected one of ours, elastic_int, elastic",
        ),
        (("--quantile", "p1"), "quantile is 'p1', expected one of p50"),
        (("--profiles", "gpu.json"), "has two profiles, expected one"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    run: Run, folder: Path, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    status, _, err = run("plan", "tenants.toml", "--profiles", "gpu.json", *arguments)
    assert status == 2
    assert message in " ".join(err.replace("│", " ").split())


def test_a_profile_is_needed_and_a_file_of_tenants(run: Run, folder: Path) -> None:
    status, _, err = run("plan", folder / "tenants.toml")
    assert (status, "--profiles" in err) == (2, True)
    status, _, err = run("plan", "--profiles", folder / "gpu.json")
    assert (status, "--check PLAN" in err) == (2, True)
    status, _, err = run("plan", "--check", folder / "p.toml", "--profiles", folder / "gpu.json", "--devices", 2)
    assert (status, "has its own devices and headroom" in " ".join(err.replace("│", " ").split())) == (2, True)
    status, _, err = run("plan", folder / "tenants.toml", "--profiles", folder)
    assert (status, "has no profile yet: run 'cotenant profile" in " ".join(err.split())) == (2, True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--placement", "net", "--goal", "latency"), "a model is placed by 'cotenant place REPOSITORY MODEL' now"),
        (("--budget-s", 1, "--latency-bound-ms", "x"), "a model is placed by 'cotenant place REPOSITORY MODEL' now"),
        (
            ("--fresh", "--lanes", "all", "--together", "a,b", "--batch", "a=2"),
            "joint plans are made by 'cotenant co-schedule REPOSITORY MODELS...' now",
        ),
        (
            ("--budget-s", 1),
            "--budget-s and --lanes are options of 'cotenant place' and 'cotenant co-schedule' now",
        ),
        (("--fresh",), "--fresh is an option of 'cotenant place' and 'cotenant co-schedule' now"),
    ],
)
def test_options_of_other_commands_name_these(run: Run, options: tuple[object, ...], sentence: str) -> None:
    assert run("plan", "models", *options) == (2, "", f"cotenant: {sentence}\n")
    assert str(options[0]) not in run("plan", "--help")[1]


@pytest.mark.parametrize(("rate", "fits"), [(0.001, True), (1e9, False)])
def test_guaranteed_rates_above_the_lanes_are_refused(run: Run, tmp_path: Path, rate: float, fits: bool) -> None:
    root = profiled(tmp_path / "models", 50, {"one": [(1, 1, 10), (2, 1, 18)]})
    (root / "one" / "config.toml").write_text(f"[tenant]\nslo_ms = 50\nrate = {rate}\n")
    file = tmp_path / "tenants.toml"
    file.write_text('[[device]]\nname = "cpu"\ncores = 1\n[[tenant]]\nname = "one"\nrate = 1\n')
    status, out, err = run("plan", file, "--profiles", root, "--quick")
    assert (status, "the guaranteed rates (tenant.rate) need" in err) == ((0, False) if fits else (2, True)), out + err


def test_the_check_of_a_file_without_tenants_asks_its_sections(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with noted(monkeypatch):
        plan = tmp_path / "plan.toml"
        plan.write_text(sections_text({"notes": {"notes": ["new", "old"]}}))
        status, out, _ = run("plan", "--check", plan, "--profiles", tmp_path / "models")
        assert (status, out) == (0, f"{plan} holds: note 'new', note 'old'.\nold\n")
        plan.write_text(sections_text({"notes": {"notes": ["old", ""]}}))
        status, out, _ = run("plan", "--check", plan, "--profiles", tmp_path / "models")
        assert (status, out) == (1, f"{plan} does not hold, 1 violation:\n  note 1 is empty in models\nold\n")
        status, out, _ = run("plan", "--check", plan, "--profiles", tmp_path / "models", "--json")
        fault = "note 1 is empty in models"
        assert json.loads(out) == {"holds": False, "violations": [fault], "stale": ["old"], "plan_file": str(plan)}


def test_without_the_solver_it_says_so_and_plans(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.setattr("cotenant.techniques.partitions.cli.plan.find_spec", lambda name: None)
    status, text, err = run("plan", folder / "tenants.toml", "--profiles", folder / "gpu.json", "--quick")
    assert status == 0
    assert "The tenants fit on 1 of 2 devices" in text
    assert "pip install 'cotenant[solver]'" in err


def test_the_number_of_devices_is_chosen(run: Run, folder: Path) -> None:
    arguments = ("--profiles", folder / "gpu.json", "--planner", "elastic", "--quick", "--json")
    for devices, there in (("3", 3), ("gpu=1", 1)):
        _, text, _ = run("plan", folder / "tenants.toml", *arguments, "--devices", devices)
        assert json.loads(text)["devices_there"] == there


# --- repositories ----------------------------------------------------------------------------------------------------


def profiled(root: Path, slo_ms: float, points: dict[str, list[tuple[int, int, float]]]) -> Path:
    """A repository of small models, with a profile that says so many ms by (items, cores)."""
    models = {}
    for name, rows in points.items():
        write_model(root, name, f"[tenant]\nslo_ms = {slo_ms}\n", {1: lambda: scaled(2.0)})
        made = [
            Point(0, items, cores, 9, *(round(ms * MS * q) for q in (0.9, 0.95, 1, 1.2))) for items, cores, ms in rows
        ]
        models[name] = ModelProfile("digest", tuple(made), (1,), (0, 1), 1.0)
    save_current(root, Profile(this_device(), "2026-01-01", "a test", models))
    return root


def test_a_repository_gives_slos_latencies_tails_and_memory(tmp_path: Path, run: Run) -> None:
    root = profiled(tmp_path / "models", 50, {"one": [(1, 1, 10), (2, 1, 18), (1, 2, 6), (2, 2, 10)]})
    file = tmp_path / "tenants.toml"
    file.write_text('[[device]]\nname = "cpu"\ncores = 2\n[[tenant]]\nname = "one"\nrate = 20\n')
    known = read_profile_costs(root).known
    request = read_request(file, known)
    assert request.loads == (Load("one", "one", 20, 50 * MS),)
    basis = costs_of_repository(root, request.devices)
    assert basis.costs.latency_ns(Work("one", 0, 2), 1, "cpu") == 18 * MS
    assert basis.tail is not None
    assert basis.tail.latency_ns(Work("one", 0, 2), 1, "cpu") == round(18 * 1.2 * MS)
    size = (root / "one" / "1" / "model.onnx").stat().st_size
    assert basis.costs.memory_bytes("one") == (128 << 20) + 4 * size
    status, text, _ = run("plan", file, "--profiles", root, "--json", "--quick")
    answer = json.loads(text)
    assert status == 0
    (slot,) = answer["devices"][0]["partitions"][0]["slots"]
    assert slot["slack_ns"] - slot["tail_slack_ns"] == round(slot["execution_ns"] * 0.2)
    assert any("memory: estimated" in note for note in read_profile_costs(root).notes)
    stored = load_profile(profile_path(root))
    weighed = {name: replace(each, memory_bytes=77 << 20) for name, each in stored.models.items()}
    save_profile(profile_path(root), replace(stored, models=weighed))
    assert costs_of_repository(root, request.devices).costs.memory_bytes("one") == 77 << 20
    assert any("memory: measured peaks of workers" in note for note in read_profile_costs(root).notes)
    write_model(root, "one", "[tenant]\nslo_ms = 50\nmemory_limit_mib = 300\n", {})
    assert costs_of_repository(root, request.devices).costs.memory_bytes("one") == 300 << 20


def test_sizes_that_were_not_measured_are_interpolated_or_left_out() -> None:
    two, four = DeviceType("cpu", splits_of_cores(2), 1 << 30), DeviceType("big", splits_of_cores(4), 1 << 30)
    tables = ProfileCosts(models_of({"one": {2: {1: 7}}}), {"one": 1}, "digest")
    basis = basis_of({"": tables}, (two, four), ["one"])
    assert [device.splits for device in basis.devices] == [((2,),), ((4,), (2, 2))]
    assert [basis.costs.latency_ns(Work("one", 0, 1), size, "big") for size in (2, 4)] == [7, 7]
    assert "size 4 was not measured; it is assumed to be as slow as the largest measured size" in " ".join(basis.notes)
    assert "left out" in " ".join(basis.notes)
    between = ProfileCosts(models_of({"one": {2: {1: 12}, 8: {1: 4}}}), {"one": 1}, "digest")
    basis = basis_of({"": between}, (four,), ["one"])
    assert [basis.costs.latency_ns(Work("one", 0, 1), size, "big") for size in (2, 4)] == [12, 8]  # 36/5, rounded up
    assert "size 4 was not measured; its latency is interpolated between measured sizes" in " ".join(basis.notes)
    with pytest.raises(PlanError, match="device 'cpu' has size 1, but model 'one' was measured at 2 only"):
        basis_of({"": tables}, (DeviceType("cpu", ((1,),), 1),), ["one"])
    with pytest.raises(PlanError, match="device 'cpu' has no profile, expected --profiles cpu=PROFILE"):
        basis_of({"gpu": tables}, (two,), ["one"])


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("profile", ["cpu", "gpu", ""])
def test_a_plan_for_one_kind_of_device_does_not_rest_on_another(device: str, profile: str) -> None:
    kind = DeviceType("node", ((100,), (50, 50)), 1 << 30, kind="gpu" if device == "gpu" else "cpu")
    tables = ProfileCosts(models_of({"one": {50: {1: 7}, 100: {1: 4}}}), {"one": 1}, "digest", kind=profile)
    if profile in (device, ""):
        assert basis_of({"": tables}, (kind,), ["one"]).costs.latency_ns(Work("one", 0, 1), 50, "node") == 7
        return
    with pytest.raises(
        PlanError,
        match=rf"'node' is a {device.upper()} .*profile of '.*' is of a {profile.upper()} .*'cotenant profile .*node=",
    ):
        basis_of({"": tables}, (kind,), ["one"])


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_a_profile_is_of_its_kind_of_device(tmp_path: Path, kind: str) -> None:
    path = write_profile(tmp_path / "profile.json", {"one": {1: {1: MS}}}, kind)
    assert read_profile_costs(path).kind == kind


@given(measured=st.integers(1, 64), size=st.integers(1, 2048))
def test_sizes_far_above_the_largest_measured_one_are_not_believed(measured: int, size: int) -> None:
    tables = ProfileCosts(models_of({"one": {measured: {1: 7}}}), {"one": 1}, "digest")
    kind = DeviceType("node", ((size,),), 1 << 30)
    if measured <= size <= MOST_BELIEVED * measured:
        assert basis_of({"": tables}, (kind,), ["one"]).costs.latency_ns(Work("one", 0, 1), size, "node") == 7
        return
    with pytest.raises(PlanError, match=f"device 'node' has size {size}, but model 'one' was measured at {measured} "):
        basis_of({"": tables}, (kind,), ["one"])


QUICK_START = {
    # ms of one row on one core, rounded figures of the quick-start models, and the SLOs of their repository
    "ocr_detection": (102, 500),
    "ocr_orientation": (1.3, 20),
    "ocr_recognition": (100, 400),
    "magika": (7.2, 30),
    "silero_vad": (0.13, 20),
    "minilm": (23, 120),
    "resnet50": (78, 250),
}


def test_the_example_of_the_quick_start_fits(tmp_path: Path, run: Run) -> None:
    from cotenant.zoo import QUICK_START as BUILT

    assert sorted(QUICK_START) == sorted(BUILT)
    for name, (ms, slo_ms) in QUICK_START.items():
        root = profiled(tmp_path / "models", slo_ms, {name: [(1, 1, ms)]})
    points = {name: [(1, 1, ms)] for name, (ms, _) in QUICK_START.items()}
    models = {
        name: ModelProfile(
            "digest", tuple(Point(0, 1, 1, 9, *(round(ms * MS),) * 4) for _, _, ms in rows), (1,), (1,), 1
        )
        for name, rows in points.items()
    }
    save_current(root, Profile(this_device(), "2026-01-01", "a test", models))
    out = tmp_path / "plan.toml"
    arguments = (EXAMPLES / "tenants.toml", "--profiles", root, "--quick", "-o", out)
    status, text, err = run("plan", *arguments)
    assert status == 0, text + err
    assert "The tenants fit on 2 of 2 devices" in text
    assert [each.slo_ns // MS for each in read_plan(out).request.loads] == [slo for _, slo in QUICK_START.values()]
    assert run("plan", "--check", out, "--profiles", root)[0] == 0


# --- pictures --------------------------------------------------------------------------------------------------------


def seen(width: int = 80) -> tuple[Assessment, list[str]]:
    """A plan made by hand on a GPU of 20 + 80 and a CPU that is half unused, and its picture."""
    loads = (
        load("small", 100, 60),
        load("middle", 50, 60),
        load("deep", 40, 250, "a tenant with quite a long name, and more"),
    )
    first = DevicePlan(
        "gpu",
        (
            PartitionPlan(20, 20 * MS, (Slot("small", 4, 100),)),
            PartitionPlan(80, 30 * MS, (Slot("middle", 2, 50), Slot(loads[2].tenant, 2, 40))),
        ),
    )
    second = DevicePlan("cpu", (PartitionPlan(2, 20 * MS, (Slot("small", 2, 1),)),))
    view = assess(Plan((first, second)), loads, (GPU, CPU), costs())
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(plan_picture(view, width))
    console.print(tenant_table(view, {"small": 0.0004, "middle": 0.123}))
    file = console.file
    assert isinstance(file, io.StringIO)
    return view, file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_the_picture_is_to_scale_without_colour(width: int) -> None:
    view, lines = seen(width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    for tenant in view.tenants:
        assert sum(tenant.tenant in line for line in lines) >= 2, "names are whole in the picture and in the table"
    top = next(number for number, line in enumerate(lines) if line.startswith("┌"))
    edges = [number for number, character in enumerate(lines[top]) if character in "┌┬┐"]
    assert edges[1] - edges[0] == pytest.approx(0.2 * (edges[2] - edges[0]), abs=1)
    bar = lines[top + 1]
    wide = view.devices[0].partitions[1]
    inside = bar[edges[1] + 1 : edges[2]]
    for letter, slot in zip("bc", wide.slots, strict=True):
        assert inside.count(letter) == pytest.approx(len(inside) * slot.execution_ns / wide.duty_ns, abs=1)
    assert inside.count("·") == pytest.approx(len(inside) * (1 - wide.load), abs=1)
    unused = next(line for line in lines if "╱" in line)
    assert unused.count("╱") == pytest.approx(len(unused) / 2, abs=2)


def test_the_picture_says_what_the_assessment_says() -> None:
    view, lines = seen(100)
    text = "\n".join(lines)
    slot = view.devices[0].partitions[1].slots[1]
    assert f"batch {slot.batch}" in text
    assert f"slack {slot.slack_ns / MS:.3g} ms ({100 * slot.slack_ns / slot.slo_ns:.0f} %)" in text
    assert [line.split()[-1] for line in lines if line.rstrip().endswith(("%", "–"))] == ["<0.1%", "12.3%", "–"]
    assert f"duty cycle 30 ms, {100 * view.devices[0].partitions[1].load:.0f} % busy" in text


def test_equal_devices_are_drawn_once() -> None:
    part = PartitionPlan(50, 20 * MS, (Slot("small", 4, 100),))
    one = DevicePlan("gpu", (part, part))
    view = assess(Plan((one, one, one)), (load("small", 300, 60),), (GPU,) * 3, costs())
    console = Console(file=io.StringIO(), width=80)
    console.print(plan_picture(view, 80))
    file = console.file
    assert isinstance(file, io.StringIO)
    assert "devices 0 to 2, each · gpu" in file.getvalue()
    assert "0 to 1, each: 50 %" in file.getvalue()
    assert file.getvalue().count("┌") == 1


def test_gauges_of_slack_are_to_scale() -> None:
    view, lines = seen(140)
    gauges = ["".join(c for c in line if c in "▒█░") for line in lines if "slack" in line and "█" in line]
    slots = [slot for device in view.devices for part in device.partitions for slot in part.slots]
    assert [len(gauge) for gauge in gauges[:-1]] == [24] * len(slots)  # the last one is the key
    for gauge, slot in zip(gauges, slots, strict=False):
        assert gauge == "".join(sorted(gauge, key="▒█░".index))
        assert gauge.count("░") == pytest.approx(24 * slot.slack_ns / slot.slo_ns, abs=1)
        assert gauge.count("█") == pytest.approx(24 * slot.execution_ns / slot.slo_ns, abs=1)


def test_the_svg_is_the_picture_in_colour_and_loads_nothing() -> None:
    view, _ = seen()
    drawn = plan_svg(view, "It fits on 2 <devices>; and more")
    root = ElementTree.fromstring(drawn)
    text = "".join("".join(root.itertext()).split())
    _, lines = seen(110)
    assert all("".join(line.split()) in text for line in lines if " /s " in line and "batch" in line)
    assert "Itfitson2<devices>;andmore" in text
    assert {rect.get("fill") for rect in root.iter("{http://www.w3.org/2000/svg}rect")} >= set(PALETTE[:3])
    assert "url(http" not in drawn
    assert "@font-face" not in drawn


def test_keys_tell_tenants_apart_and_names_are_shortened_in_the_middle() -> None:
    keys = keys_of([f"t{number}" for number in range(52)])
    assert len({letter for letter, _ in keys.values()}) == 52
    assert short("traffic.detection", 9) == "traf…tion"
    assert short("short", 9) == "short"
    assert columns_of([20, 80], 79) == [16, 63]
    assert columns_of([1, 99], 79)[0] == 3


def test_a_plan_file_is_what_the_planner_made(folder: Path) -> None:
    request = read_request(folder / "tenants.toml")
    believed = table_costs({"gpu": latencies(GPU.sizes, GPU.whole)}, dict.fromkeys(MODELS, 1))
    plan = ELASTIC.plan(request.loads, request.devices, believed)
    assert isinstance(plan, Plan)
    path = folder / "other.toml"
    path.write_text(plan_text(PlanFile(request, plan, 0.1)), encoding="utf-8")
    assert read_plan(path).plan == plan
