"""Configuration: every error names the file, the key and what was expected; the device section makes lanes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from cotenant.config import (
    DeviceSection,
    PolicySection,
    ServerConfig,
    load_model_config,
    load_server_config,
)
from cotenant.core.snapshot import DropRule
from cotenant.errors import ConfigError
from cotenant.execute.layout import device_cores, lanes_of
from cotenant.policies import policy_class, policy_names
from cotenant.policies.registry import make_policy, options_of, rebuild_policy
from cotenant.techniques.overlap.policy.headroom_control import Overlap
from cotenant.trace import header
from cotenant.work import Machine, Share
from scenario import CORES, ONE_LANE, TWO_LANES, tables

AVAILABLE = tuple(sorted(os.sched_getaffinity(0)))

MODEL_ERRORS = [
    ("", "tenant.slo_ms is missing", "slo_ms = 100"),
    ("tenant = 5", "tenant.slo_ms is missing", "slo_ms = 100"),
    ("[tenant]\nname = 'x'", "tenant.slo_ms is missing", "slo_ms = 100"),
    ("[tenant]\nslo_ms = 0", "tenant.slo_ms", "> 0"),
    ("[tenant]\nslo_ms = nan", "tenant.slo_ms", "> 0"),
    ("[tenant]\nslo_ms = inf", "tenant.slo_ms", "<= 3600000"),
    ("[tenant]\nslo_ms = '5'", "tenant.slo_ms", "Expected `float`"),
    ("[tenant]\nslo_ms = true", "tenant.slo_ms", "Expected `float`"),
    ("[tenant]\nslo_ms = 5\nslo = 6", "tenant", "unknown field `slo`"),
    ("[tenant]\nslo_ms = 5\nweight = -1", "tenant.weight", "> 0"),
    ("[tenant]\nslo_ms = 5\nweight = inf", "tenant.weight", "<="),
    ("[tenant]\nslo_ms = 5\npriority = 65536", "tenant.priority", "<= 65535"),
    ("[tenant]\nslo_ms = 5\npriority = 1.5", "tenant.priority", "Expected `int`"),
    ("[tenant]\nslo_ms = 5\nmax_queue = 0", "tenant.max_queue", ">= 1"),
    ("[tenant]\nslo_ms = 5\n[model]\nmax_batch = 0", "model.max_batch", ">= 1"),
    ("[tenant]\nslo_ms = 5\n[model]\nmax_batch = 2000", "model.max_batch", "<= 1024"),
    ("[tenant]\nslo_ms = 5\n[model]\nshapes = [{x = [1, 0]}]", "model.shapes[0]", ">= 1"),
    ("[tenant]\nslo_ms = 5\n[segments]\nmax_ms = inf", "segments.max_ms", "<= 3600000"),
    ("[tenant]\nslo_ms = 5\n[model", "not valid TOML", "table declaration"),
    ("[tenant]\nslo_ms = 5\n[mdoel]", "unknown field `mdoel`", "unknown"),
]


@pytest.mark.parametrize(("text", "key", "expected"), MODEL_ERRORS)
def test_a_wrong_model_config_is_named(tmp_path: Path, text: str, key: str, expected: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_model_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert key in message
    assert expected in message


def test_a_model_config_needs_its_slo_alone(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[tenant]\nslo_ms = 100\n", encoding="utf-8")
    config = load_model_config(path)
    assert (config.tenant.slo_ms, config.tenant.priority, config.tenant.max_queue) == (100.0, 0, 256)
    assert (config.model.max_batch, config.model.shapes, config.segments.max_ms) == (1, (), None)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.toml: cannot be read \(No such file"):
        load_model_config(tmp_path / "config.toml")
    (tmp_path / "config.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_model_config(tmp_path / "config.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_server_config(tmp_path / "folder.toml")


SERVER_ERRORS = [
    ("[server]\nhttp_port = 65536", "server.http_port", "<= 65535"),
    ("[server]\nport = 1", "server", "unknown field `port`"),
    ("[server]\nmax_body_mib = 0", "server.max_body_mib", "> 0"),
    ("[server]\ndrain_s = inf", "server.drain_s", "<= 86400"),
    ("[server]\ndrain_s = -1", "server.drain_s", ">= 0"),
    ("[device]\nlane_nice = 5", "device", "unknown field `lane_nice`, expected one of cores, lanes"),
    ("[device]\nkind = 'tpu'", "device.kind", "'tpu', expected one of cpu, cuda"),
    ("[device]\nlanes = [[0], 1]", "device.lanes", "Expected `array`"),
    ("[policy]\ndrop = 'maybe'", "policy.drop", "maybe"),
    ("[policy]\nslack_share = 1.5", "policy.slack_share", "<= 1"),
    ("[policy]\nname = 1", "policy.name", "Expected `str`"),
    ("[policy]\nname = 'zzz'", "policy: name is 'zzz'", "edf"),
    ("[policy]\nname = 'overlap'\nways = 0", "policy.ways", ">= 1"),
    (
        "[policy]\nways = 2",
        "policy.ways",
        "policy 'shares' has no such option, expected one of drop, preempt",
    ),
    ("policy = 3", "policy", "Expected `object`"),
    ("[predict]\nquantile = 'p98'", "predict.quantile", "p98"),
]


@pytest.mark.parametrize(("text", "key", "expected"), SERVER_ERRORS)
def test_a_wrong_server_config_is_named(tmp_path: Path, text: str, key: str, expected: str) -> None:
    path = tmp_path / "cotenant.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_server_config(path)
    assert str(caught.value).startswith(f"{path}: {key}")
    assert expected in str(caught.value)


def test_old_names_of_options_are_read_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cotenant.toml"
    path.write_text("[policy]\nname = 'edf'\nstretch = 0.3\ncautious = false\n", encoding="utf-8")
    for _ in range(2):
        assert load_server_config(path).policy.options == {"slack_share": 0.3, "tail_aware": False}
    for old, new in (("stretch", "slack_share"), ("cautious", "tail_aware")):
        text = f"{path}: policy.{old} is deprecated and ends with version 0.3: use {new!r} instead"
        assert caplog.messages.count(text) == 1
    assert load_server_config(path, {"policy.cautious": True}).policy.options["tail_aware"] is True
    assert "command line.cautious is deprecated and ends with version 0.3: use 'tail_aware' instead" in caplog.messages


def test_a_repository_without_settings_has_defaults(tmp_path: Path) -> None:
    assert load_server_config(tmp_path / "cotenant.toml") == ServerConfig()
    (tmp_path / "cotenant.toml").write_text(
        "[policy]\nname = 'sjf'\ndrop = 'expired'\npreempt = false\n[device]\nlanes = [[0, 1]]\n", encoding="utf-8"
    )
    settings = load_server_config(tmp_path / "cotenant.toml")
    assert settings.policy == PolicySection("sjf", {"drop": DropRule.EXPIRED, "preempt": False})
    assert settings.device.lanes == ((0, 1),)
    assert settings.server == ServerConfig().server


def test_cores_are_all_that_the_process_may_use_unless_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_cores(DeviceSection()) == AVAILABLE
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5})
    assert device_cores(DeviceSection()) == (2, 3, 5)
    assert device_cores(DeviceSection(cores=(5, 2))) == (5, 2)
    with pytest.raises(ConfigError, match=r"cores names \[0, 4\], but this process may use only \[2, 3, 5\]"):
        device_cores(DeviceSection(cores=(0, 2, 4)))
    with pytest.raises(ConfigError, match="each core once"):
        device_cores(DeviceSection(cores=(2, 2)))


def test_lanes_divide_the_cores() -> None:
    cores = (0, 1, 2, 3)
    assert lanes_of(DeviceSection(), cores) == tuple(Share((core,)) for core in cores)
    assert lanes_of(DeviceSection(lanes="all"), cores) == (Share(cores),)
    assert lanes_of(DeviceSection(lanes=((3, 0), (1,))), cores) == (Share((3, 0)), Share((1,)))


@pytest.mark.parametrize("lanes", ["both", ((0,), (0,)), ((0, 1), (1, 2)), ((7,),), (), ((),), ((0, 0),)])
def test_lanes_that_do_not_fit_are_named(lanes: object) -> None:
    with pytest.raises(ConfigError, match="lanes"):
        lanes_of(DeviceSection(lanes=lanes), (0, 1, 2, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", policy_names())
def test_policies_are_made_by_name_and_come_back_from_a_trace(name: str) -> None:
    wished = {"drop": "expired", "preempt": True, "slack_share": 0.3, "ways": 3, "members": 1, "repeat": False}
    options = {key: value for key, value in wished.items() if key in options_of(policy_class(name))}
    policy = make_policy(name, options, TWO_LANES)
    cuts = True if "preempt" in options else policy.spec.preempt
    spec = policy.spec
    assert (spec.name, spec.drop, spec.preempt, spec.lanes) == (name, DropRule.EXPIRED, cuts, TWO_LANES)
    assert getattr(policy, "slack_share", 0.3) == 0.3
    if isinstance(policy, Overlap):
        assert (policy.ways, policy.members, policy.repeat) == (3, 1, False)
    assert make_policy(name, {}, ONE_LANE) == policy_class(name)(ONE_LANE)
    head = msgspec.json.decode(
        msgspec.json.encode(header(policy, tables({"a": 1}), (), Machine.cpu(CORES), created="").policy_options)
    )
    assert rebuild_policy(name, head) == policy


def test_a_former_policy_name_is_read_with_a_deprecation_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cotenant.toml"
    path.write_text('[policy]\nname = "clustered"\ndrop = "none"\n')
    settings = load_server_config(path)
    assert (settings.policy.name, settings.policy.options) == ("joint", {"drop": DropRule.NONE})
    assert "policy name 'clustered' is deprecated and will end with 0.3; write 'joint'" in caplog.text
    assert load_server_config(tmp_path / "none.toml", {"policy.name": "clustered"}).policy.name == "joint"
    assert len(caplog.records) == 2
    assert make_policy("clustered", {}, TWO_LANES) == make_policy("joint", {}, TWO_LANES)
    lanes = [{"cores": [0], "device": "cpu"}, {"cores": [1], "device": "cpu"}]
    options = {"lanes": lanes, "drop": "none", "preempt": False, "stretch": 0.1, "joint_plans": []}
    assert rebuild_policy("clustered", options) == rebuild_policy("joint", options), "as a trace of before says it"


def test_unknown_policies_and_damaged_headers_are_named() -> None:
    with pytest.raises(
        ConfigError,
        match=r"name is 'zzz', expected one of .*duty_cycle, edf, fair, fcfs, .*joint, .*layer_block, ",
    ):
        make_policy("zzz", {}, ONE_LANE)
    expected = r"\[policy\]: policy 'overlap': members is 3, expected 0 \(one per lane, 4 at most\) to 2"
    with pytest.raises(ConfigError, match=expected):
        make_policy("overlap", {"members": 3}, TWO_LANES)
    good = {"lanes": [{"cores": [0], "device": "cpu"}], "drop": "none", "preempt": False, "slack_share": 0.1}
    for damage in ({"drop": "zzz"}, {"lanes": [{}]}, {"lanes": None}, {"lanes": [{"cores": [], "device": "cpu"}]}):
        with pytest.raises(ConfigError, match="trace header: policy_options cannot be used"):
            rebuild_policy("edf", {**good, **damage})
    with pytest.raises(ConfigError, match="trace header"):
        rebuild_policy("edf", {})
