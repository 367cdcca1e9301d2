"""A cluster serves no applications, and says so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from application_samples import CHAIN, write_application, write_models
from cotenant.cluster.forward import Forwarder
from cotenant.cluster.head import models_of
from cotenant.cluster.parts import table_of
from cotenant.plan.types import Load, PlanError
from cotenant.serve.api import ServeError, Status


def refusal(forwarder: Forwarder, model: str) -> ServeError:
    async def attempt(link: Any) -> Any:
        raise AssertionError("nothing is sent")

    with pytest.raises(ServeError) as caught:
        asyncio.run(forwarder.infer(model, attempt))
    return caught.value


def test_the_gateway_refuses_an_application_by_name() -> None:
    forwarder = Forwarder(lambda node, address: None)
    table = table_of(1, {}, (), {}, {}, ("scan",))
    for number, each in enumerate((table, table.without(("n0",))), start=1):
        forwarder.set_table(each)
        assert each.version == number
        error = refusal(forwarder, "scan")
        assert error.status is Status.UNIMPLEMENTED
        assert "'scan' is an application, and a cluster serves single models alone" in error.message
        assert refusal(forwarder, "other").status is Status.NOT_FOUND


def test_a_stage_without_a_tenant_of_its_name_is_named(tmp_path: Path) -> None:
    root = write_models(tmp_path / "models", "twice", "thrice")
    write_application(root, "chain", CHAIN)
    with pytest.raises(PlanError, match=r"'chain.first' owns no model in .* tenant.name is APPLICATION"):
        models_of(root, [Load("chain.first", "twice", 1.0, 10)])
    assert models_of(root, [Load("twice", "twice", 1.0, 10)]) == {"twice": "twice"}
