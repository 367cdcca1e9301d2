"""Shares of a GPU: the arithmetic of groups, green contexts over a driver that is not there, and over a real one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu._sm_probe import SmSurvey
from cotenant.config import DeviceSection, load_server_config
from cotenant.errors import ConfigError, InvalidValueError
from cotenant.execute.gpu import cuda_driver, sm_groups
from cotenant.execute.gpu.configured import sm_lanes
from cotenant.execute.gpu.cuda_driver import GpuError, load_driver
from cotenant.execute.gpu.sm_ladder import (
    SmGrid,
    counts_of,
    granularity_of,
    groups_of,
    is_whole,
    partition_of,
    shares_of,
    whole,
)
from cotenant.execute.gpu.sm_shares import GreenShares, PlainShares
from cotenant.execute.layout import lanes_of
from cotenant.work import Share
from fake_cuda import FakeCuda

H100 = SmGrid(132, 8)


def slots(start: int, stop: int, index: int = 0) -> Share:
    return Share(tuple(range(start, stop)), f"cuda:{index}")


def opened(driver: FakeCuda, index: int = 0) -> GreenShares:
    return GreenShares.open(index, driver, wrap=lambda address, index: ("stream", address, index))


# --- the ladder ----------------------------------------------------------------------------------------------------


def test_what_a_grid_leaves_over() -> None:
    assert (H100.groups, H100.spare) == (16, 4)
    assert (SmGrid(108, 4).groups, SmGrid(108, 4).spare) == (27, 0)
    assert SmGrid(132, 8, 15).spare == 12
    for wrong in ((132, 8, 17), (4, 8, 0), (8, 0, 4)):
        with pytest.raises(InvalidValueError, match="groups"):
            SmGrid(*wrong)


def test_granularity_by_capability() -> None:
    found = [granularity_of(capability) for capability in ((7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0))]
    assert found == [2, 2, 4, 4, 8, 8, 8]


@pytest.mark.parametrize(
    ("percents", "sizes"),
    [
        ((50, 50), (64, 64)),
        ((25, 25, 25, 25), (32, 32, 32, 32)),
        ((100,), (128,)),
        ((50,), (64,)),
        ((20, 80), (24, 104)),
        ((40, 60), (48, 80)),  # 6.6 and 9.9 groups: both rounded up are too many, and the first gained more
        ((33.4, 33.3, 33.3), (48, 40, 40)),
        ((100 / 3, 100 / 3, 100 / 3), (40, 40, 40)),
        ((7, 93), (8, 120)),
    ],
)
def test_shares_in_percent_become_groups(percents: tuple[float, ...], sizes: tuple[int, ...]) -> None:
    found = shares_of(percents, H100, 0)
    assert tuple(partition.size for partition in found) == sizes
    assert found[0] == slots(0, sizes[0])
    assert all(partition.device == "cuda:0" for partition in found)


@pytest.mark.parametrize(
    ("percents", "text"),
    [
        ((60, 50), "100 % in all at most, not 110 %"),
        ((5, 50), "shares is 5, expected at least 7 %: 8 of 132 SMs are the smallest share"),
        ((0,), "at least 7 %"),
        ((-50,), "at least 7 %"),
        ((float("nan"),), "at least 7 %"),
        ((), "100 % in all"),
    ],
)
def test_shares_that_cannot_be(percents: tuple[float, ...], text: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        shares_of(percents, H100, 0, "cotenant.toml")
    assert str(caught.value).startswith("cotenant.toml: shares is ")
    assert text in str(caught.value)


def test_more_shares_than_groups() -> None:
    assert counts_of((25, 25, 25, 25), SmGrid(20, 4, 4)) == (1, 1, 1, 1)
    with pytest.raises(InvalidValueError, match="3 shares at most: the driver makes so many groups"):
        shares_of((25, 25, 25, 25), SmGrid(20, 4, 3), 0)


@st.composite
def divisions(draw: st.DrawFn, grid: SmGrid) -> tuple[float, ...]:
    """GpuPartitioner in percent, each of a group at least, 100 % in all at most."""
    count = draw(st.integers(1, min(8, grid.groups)))
    weight = st.floats(0.05, 1) | st.just(0.5)
    weights = draw(st.lists(weight, min_size=count, max_size=count))
    scale = draw(st.floats(0.5, 1)) * 100 / sum(weights)
    return tuple(w * scale for w in weights if w * scale * grid.total >= 100 * grid.granularity) or (100.0,)


GRIDS = st.sampled_from([H100, SmGrid(108, 4), SmGrid(68, 2), SmGrid(114, 8), SmGrid(10, 1), SmGrid(8, 8)])


@given(data=st.data(), grid=GRIDS)
def test_shares_are_disjoint_fit_and_are_near_what_was_asked(data: st.DataObject, grid: SmGrid) -> None:
    percents = data.draw(divisions(grid))
    found = shares_of(percents, grid, 1)
    assert len(found) == len(percents)
    assert all(not a.mask & b.mask for a, b in combinations(found, 2))
    assert sum(partition.size for partition in found) <= grid.total
    for partition, percent in zip(found, percents, strict=True):
        assert partition.size % grid.granularity == 0
        assert abs(partition.size - percent * grid.total / 100) < grid.granularity + 1e-6
    sizes = {percent: partition.size for partition, percent in zip(found, percents, strict=True)}
    assert [sizes[percent] for percent in percents] == [partition.size for partition in found], "equal shares are equal"
    used = [group for partition in found for group in groups_of(partition, grid)]
    assert used == list(range(len(used)))


def test_a_partition_is_made_of_whole_groups() -> None:
    assert groups_of(partition_of((3, 0), H100, 0), H100) == (0, 3)
    assert is_whole(whole(H100, 0), H100)
    assert not is_whole(slots(0, 128), H100)
    for wrong in (slots(0, 7), slots(4, 12), slots(124, 132), whole(H100, 0)):
        with pytest.raises(InvalidValueError, match="all 8 slots of each of its groups, of 16 groups"):
            groups_of(wrong, H100)


# --- the configuration -----------------------------------------------------------------------------------------------


def test_lanes_of_a_gpu() -> None:
    section = DeviceSection(kind="cuda", index=2, shares=(50.0, 25.0))
    assert sm_lanes(section, grid=H100) == (slots(0, 64, 2), slots(64, 96, 2))
    assert sm_lanes(DeviceSection(kind="cuda"), grid=H100) == (slots(0, 132),)
    assert sm_lanes(DeviceSection(kind="cuda", lanes="all"), grid=H100) == (slots(0, 132),)


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (DeviceSection(shares=(50.0,)), "shares divides a GPU; set kind = 'cuda'"),
        (DeviceSection(kind="cuda", lanes=((0,), (1,))), "lists of cores divide a CPU, shares = [50, 50] a GPU"),
        (DeviceSection(kind="cuda", lanes="some"), "lanes is 'some'"),
        (DeviceSection(kind="cuda", lanes="all", shares=(50.0,)), "expected one of them"),
        (DeviceSection(kind="cuda", shares=(60.0, 60.0)), "100 % in all at most, not 120 %"),
        (DeviceSection(kind="cuda", shares=(2.0,)), "at least 7 %"),
        (DeviceSection(kind="cuda", isolation="vm"), "isolation is 'vm', expected one of process or thread"),
    ],
)
def test_wrong_lanes_of_a_gpu(section: DeviceSection, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.execute.gpu.configured._ask_driver", lambda *_: H100)
    with pytest.raises(ConfigError) as caught:
        lanes_of(section, (0, 1), "cotenant.toml")
    assert str(caught.value).startswith("cotenant.toml: ")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("kind = 'gpu'", "device.kind: Invalid enum value 'gpu'"),
        ("index = -1", "device.index: Expected `int` >= 0"),
        ("sharing = 'mps'", "device.sharing: Invalid enum value 'mps'"),
        ("shares = [50, 0]", "device.shares[1]: Expected `float` > 0"),
        ("shares = [101]", "device.shares[0]: Expected `float` <= 100"),
    ],
)
def test_wrong_settings_of_a_gpu_are_named(tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "cotenant.toml"
    path.write_text(f"[device]\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_server_config(path)
    assert str(caught.value).startswith(f"{path}: {text}")


def test_settings_of_a_gpu_are_read(tmp_path: Path) -> None:
    path = tmp_path / "cotenant.toml"
    path.write_text("[device]\nkind = 'cuda'\nindex = 1\nsharing = 'streams'\nshares = [50, 50]\n", encoding="utf-8")
    section = load_server_config(path).device
    assert section == DeviceSection(kind="cuda", index=1, sharing="streams", shares=(50.0, 50.0))
    assert sm_lanes(section, grid=SmGrid(132)) == (slots(0, 66, 1), slots(66, 132, 1))


def test_the_driver_is_asked_when_nobody_says_how_a_gpu_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    section = DeviceSection(kind="cuda", shares=(50.0, 50.0))
    monkeypatch.setattr(sm_groups, "load_driver", lambda: FakeCuda(108, 4))
    assert lanes_of(section, (0,)) == (slots(0, 52), slots(52, 104))
    plain = DeviceSection(kind="cuda", sharing="streams", shares=(50.0, 50.0))
    assert lanes_of(plain, (0,)) == (slots(0, 54), slots(54, 108))
    monkeypatch.setattr(sm_groups, "load_driver", lambda: FakeCuda(gpus=0))
    with pytest.raises(ConfigError, match=r"kind is 'cuda', but there is no cuda:0; the driver sees 0 GPUs"):
        lanes_of(section, (0,))


# --- green contexts ------------------------------------------------------------------------------------------------


def test_one_split_gives_all_groups() -> None:
    shares = opened(FakeCuda())
    assert shares.grid == H100
    assert opened(FakeCuda(108, 4, capability=(8, 0))).grid == SmGrid(108, 4)
    assert opened(FakeCuda(132, 8, groups=15)).grid == SmGrid(132, 8, 15)


def test_bindings_that_do_not_say_the_smallest_share() -> None:
    assert opened(FakeCuda(132, 8, say_least=False)).grid == H100
    assert opened(FakeCuda(68, 2, say_least=False, capability=(7, 5))).grid == SmGrid(68, 2)


def test_shares_have_the_sms_that_the_driver_granted_and_streams_of_their_own() -> None:
    driver = FakeCuda()
    shares = opened(driver)
    lanes = shares_of((50, 25), H100, 0)
    assert shares.split(lanes) > 0
    assert shares.granted == {lanes[0]: 64, lanes[1]: 32}
    first, second = (shares.stream(lane)[1] for lane in lanes)
    assert shares.stream(lanes[0]) == ("stream", first, 0)
    assert shares.stream(lanes[0], urgent=True) is shares.stream(lanes[0])
    assert shares.stream(lanes[0], urgent=True)[1] == first
    assert driver.streams[first] != driver.streams[second]
    assert driver.streams.keys() == {first, second}
    shares.close()
    assert (driver.streams, driver.contexts, driver.primary, driver.stack) == ({}, {}, 0, [])
    shares.close()
    with pytest.raises(GpuError, match="the shares of cuda:0 are closed"):
        shares.split(lanes)


def test_the_whole_device_needs_no_green_context() -> None:
    driver = FakeCuda()
    shares = opened(driver)
    everything = whole(shares.grid, 0)
    shares.split([everything])
    assert shares.granted == {everything: 132}
    assert driver.contexts == {}
    assert driver.streams[shares.stream(everything)[1]] == 1
    shares.close()
    assert (driver.streams, driver.primary) == ({}, 0)


def test_further_partitions_leave_those_that_are_there() -> None:
    driver = FakeCuda()
    shares = opened(driver)
    lanes = shares_of((50, 25, 25), H100, 0)
    shares.split(lanes[:2])
    handles = [shares.stream(lane)[1] for lane in lanes[:2]]
    with pytest.raises(InvalidValueError, match="one of the 2 that it was split into"):
        shares.stream(lanes[2])
    shares.split((lanes[0], lanes[2], slots(0, 128)))
    assert shares.granted == {lanes[0]: 64, lanes[1]: 32, lanes[2]: 32, slots(0, 128): 128}
    assert [shares.stream(lane)[1] for lane in lanes[:2]] == handles
    assert len(driver.contexts) == len(driver.streams) == 4


@pytest.mark.parametrize("call", ["cuGreenCtxCreate", "cuGreenCtxGetDevResource", "cuGreenCtxStreamCreate"])
def test_a_refusal_leaves_what_was_there(call: str) -> None:
    driver = FakeCuda()
    shares = opened(driver)
    lanes = shares_of((50, 50), H100, 0)
    shares.split(lanes)
    handle = shares.stream(lanes[1])[1]
    driver.refuse[call] = 1
    with pytest.raises(GpuError, match=f"{call} failed: cuda_error_"):
        shares.split([lanes[1], slots(0, 32), slots(32, 64)])
    assert shares.granted == {lanes[0]: 64, lanes[1]: 64}
    assert shares.stream(lanes[1])[1] == handle
    assert len(driver.contexts) == 2
    with pytest.raises(InvalidValueError, match="of its groups"):
        shares.split([slots(0, 32), slots(32, 35)])
    with pytest.raises(InvalidValueError, match="device is 'cuda:1', expected cuda:0"):
        shares.split([slots(0, 32, 1)])
    assert len(shares.granted) == 2


@pytest.mark.parametrize(
    ("driver", "index", "text"),
    [
        (FakeCuda(gpus=1), 1, "there is no cuda:1; the driver sees 1 GPU$"),
        (FakeCuda(version=12020), 0, "the driver is of CUDA 12.2, and green contexts need one of 12.4 or newer"),
        (FakeCuda(groups=0), 0, "makes no group of 8 SMs of the 132"),
    ],
)
def test_why_there_are_no_green_contexts(driver: FakeCuda, index: int, text: str) -> None:
    with pytest.raises(GpuError, match=text):
        opened(driver, index)
    assert driver.primary == 0


def test_missing_bindings_and_missing_drivers_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(GpuError, match="the package cuda-bindings is not installed"):
        load_driver()

    class NoLibrary(FakeCuda):
        def cuInit(self, _flags: int) -> tuple[Any, ...]:  # noqa: N802
            raise RuntimeError("no libcuda.so.1 here")

    monkeypatch.setattr(cuda_driver, "import_module", lambda _: NoLibrary())
    with pytest.raises(GpuError, match="library cannot be loaded; is there a GPU, and its driver"):
        load_driver()
    monkeypatch.setattr(cuda_driver, "import_module", lambda _: object())
    with pytest.raises(GpuError, match="have no cuInit"):
        load_driver()


# --- plain streams -------------------------------------------------------------------------------------------------


def test_plain_streams_have_the_same_surface() -> None:
    made: list[tuple[int, bool]] = []
    shares = PlainShares(1, SmGrid(132), lambda index, urgent: made.append((index, urgent)) or object())
    lanes = shares_of((50, 50), shares.grid, 1)
    assert [lane.size for lane in lanes] == [66, 66]
    assert shares.split(lanes) > 0
    assert shares.granted == {lanes[0]: 132, lanes[1]: 132}
    kept = shares.stream(lanes[1], urgent=True)
    assert shares.stream(lanes[1]) is not kept
    shares.split([lanes[1], whole(shares.grid, 1)])
    assert shares.stream(lanes[1], urgent=True) is kept
    assert made == [(1, True), (1, False)]
    with pytest.raises(InvalidValueError, match="one of the 3"):
        shares.stream(slots(0, 12, 1))
    with pytest.raises(InvalidValueError, match="expected cuda:1"):
        shares.split([slots(0, 66)])


# --- which SMs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "further", "extra", "problems"),
    [
        (range(8), range(8, 16), 2, 0, 0),
        (range(8), range(8, 16), 0, 0, 0),
        ([*range(8), 16, 17], [*range(8, 16), 16, 17], 2, 2, 0),  # dynamic parallelism: two SMs more, for both
        ([*range(8), 16], range(8, 16), 2, 1, 0),
        ([*range(8), 16, 17], [*range(8, 16), 16, 17], 0, 2, 2),  # of a device that has no such SMs
        ([*range(8), 16, 17, 18], range(8, 16), 2, 3, 1),
        (range(8), range(6, 14), 2, 0, 2),  # two in common, but none of them is one more
        (range(7), range(8, 16), 2, 0, 1),
    ],
)
def test_sms_beside_those_of_a_share_are_told_and_two_are_no_problem_where_they_may_be(
    one: Sequence[int], other: Sequence[int], further: int, extra: int, problems: int
) -> None:
    lanes = (slots(0, 8), slots(8, 16))
    found = SmSurvey({lanes[0]: tuple(one), lanes[1]: tuple(other)}, dict.fromkeys(lanes, 8), further)
    assert (found.extra, len(found.problems)) == (extra, problems)
