"""What the log says of a model that no profile holds for: what is missing, and the command that measures it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cotenant.config import load_server_config
from cotenant.measure.opened_model import OpenedModel, open_version
from cotenant.measure.profile_misfit import profile_misfit
from cotenant.measure.solo import Effort
from cotenant.measure.sweep import profile_repository
from cotenant.profiles.profile_file import Profile, load_profile, save_profile
from cotenant.repository import find_versions, profile_path
from cotenant.work import Share
from repositories import config, scaled, write_model

ONE = Share((min(os.sched_getaffinity(0)),))


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Profile]:
    root = tmp_path_factory.mktemp("root") / "models"
    write_model(root, "net", config(max_batch=2), {1: lambda: scaled(2.0)})
    server = load_server_config(root / "cotenant.toml", {"device.cores": list(ONE.cores)})
    profile, errors = profile_repository(root, server, Effort(0.0, 1, 1, 0), fresh=False, on_step=lambda *_: None)
    assert errors == {}
    return root, profile


@pytest.fixture
def opened(profiled: tuple[Path, Profile]) -> Iterator[OpenedModel]:
    root, profile = profiled
    save_profile(profile_path(root), profile)
    found = open_version(root, find_versions(root, "net")[0])
    with found.runner:
        yield found


def test_what_is_missing_is_said(profiled: tuple[Path, Profile], opened: OpenedModel) -> None:
    root, profile = profiled
    net, path = profile.models["net"], profile_path(root)

    def told(changed: Profile, *shares: Share) -> str:
        save_profile(path, changed)
        return profile_misfit(root, opened, shares or (ONE,))

    sizes = told(profile, ONE, Share(tuple(range(2))), Share(tuple(range(4))))
    assert "lacks shares of size 2, 4, on which this server's policy launches" in sizes
    assert "'cotenant profile models --partitions 2 --partitions 4'" in sizes
    assert "does not have it" in told(replace(profile, models={}))
    other = told(replace(profile, models={"net": replace(net, digest="x")}))
    assert "its kernels, its placement, or the packages that run it" in other
    small = replace(net, points=tuple(point for point in net.points if point.items == 1))
    assert "lacks its largest batch, 2 rows" in told(replace(profile, models={"net": small}))
    elsewhere = replace(profile, device=replace(profile.device, processor="an abacus"))
    assert "of another machine or engine (an abacus)" in told(elsewhere)
    path.write_text("{}")
    assert str(path) in profile_misfit(root, opened, (ONE,))
    path.unlink()
    assert "there is no profile; run 'cotenant profile models'" in profile_misfit(root, opened, (ONE,))


def test_a_changed_model_is_named_with_what_changed(profiled: tuple[Path, Profile], opened: OpenedModel) -> None:
    root, profile = profiled
    content = replace(profile.models["net"].content, files="other")  # type: ignore[type-var]
    save_profile(
        profile_path(root),
        replace(profile, models={"net": replace(profile.models["net"], digest="x", content=content)}),
    )
    text = profile_misfit(root, opened, (ONE,))
    assert text.startswith("'net': files in net/1 changed since it was measured; run 'cotenant profile models'")
    assert load_profile(profile_path(root)).models["net"].digest == "x"
