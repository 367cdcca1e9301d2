from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cotenant.load import LiveStats, LoadError, TenantLive
from cotenant.load.clients import ModelInfo
from cotenant.load.request_samples import sample_pool, slo_of
from cotenant.report.live import live_table
from cotenant.types import Outcome
from cotenant.workload import Poisson, TenantLoad
from cotenant.zoo import sample_inputs

TINY = {"name": "x", "datatype": "FP32", "shape": [-1, 16]}
MINILM = [{"name": name, "datatype": "INT64", "shape": [-1, -1]} for name in ("input_ids", "attention_mask")]
MINILM_SHAPES = (
    '[{"input_ids": [1, 32], "attention_mask": [1, 32]}, {"input_ids": [1, 128], "attention_mask": [1, 128]}]'
)


def info(*inputs: dict[str, Any], max_batch: int = 0, **parameters: str) -> ModelInfo:
    config = {"max_batch_size": max_batch, "parameters": {k: {"string_value": v} for k, v in parameters.items()}}
    return ModelInfo({"inputs": list(inputs)}, config)


def pool(model: str, about: ModelInfo, **load: Any) -> list[Any]:
    return list(sample_pool(TenantLoad(model, model, Poisson(1.0), **load), about, np.random.default_rng(3), 4))


def test_a_model_of_the_zoo_gets_its_samples() -> None:
    expected = sample_inputs("tiny", np.random.default_rng(3))
    np.testing.assert_array_equal(pool("tiny", info(TINY))[0]["x"], expected["x"])


@pytest.mark.parametrize("shape", [0, 1])
def test_zoo_samples_have_the_declared_shape_asked_for(shape: int) -> None:
    for sample in pool("minilm", info(*MINILM, shapes=MINILM_SHAPES), shape=shape):
        assert sample["input_ids"].shape == (1, (32, 128)[shape])
        assert sample["input_ids"].max() > 1  # words, not made-up zeros and ones


@pytest.mark.parametrize(
    "tensor",
    [
        {"name": "y", "datatype": "FP32", "shape": [-1, 16]},
        {"name": "x", "datatype": "FP64", "shape": [-1, 16]},
        {"name": "x", "datatype": "FP32", "shape": [-1, 17]},
        {"name": "x", "datatype": "FP32", "shape": [-1, 16, 1]},
    ],
)
def test_another_model_of_that_name_gets_data_that_fits_it(tensor: dict[str, Any]) -> None:
    sample = pool("tiny", info(tensor))[0]
    array = sample[tensor["name"]]
    assert array.shape == tuple(abs(size) for size in tensor["shape"])
    assert array.dtype == {"FP32": np.float32, "FP64": np.float64}[tensor["datatype"]]


def test_items_are_rows_of_a_declared_shape() -> None:
    about = info({"name": "z", "datatype": "BYTES", "shape": [-1, 2]}, max_batch=8, shapes='[{"z": [4, 2]}]')
    assert pool("unheard of", about, items=3)[0]["z"].shape == (3, 2)


def test_a_datatype_that_cannot_be_made_up_is_said() -> None:
    with pytest.raises(LoadError, match="datatype FP8"):
        pool("unheard of", info({"name": "z", "datatype": "FP8", "shape": [1]}))


@pytest.mark.parametrize("text", ["", "soon", "-1", "0", "nan"])
def test_a_server_without_a_usable_slo_is_said(text: str) -> None:
    with pytest.raises(LoadError, match="set slo_ms in the workload"):
        slo_of(TenantLoad("m", "m", Poisson(1.0)), info(slo_ms=text))


def test_the_workload_overrides_the_slo_of_the_server() -> None:
    assert slo_of(TenantLoad("m", "m", Poisson(1.0), slo_ns=5), info(slo_ms="12.5")) == 5
    assert slo_of(TenantLoad("m", "m", Poisson(1.0)), info(slo_ms="12.5")) == 12_500_000


def test_live_table_shows_every_tenant() -> None:
    counts = dict.fromkeys(Outcome, 0) | {Outcome.ANSWERED: 30, Outcome.DROPPED: 10}
    stats = LiveStats(
        5 * 10**9, 10**10, (TenantLive("ocr", 400_000_000, 45, 5, counts, 120_000_000, None, 6.0),), 10**6, True
    )
    console = Console(width=160)
    with console.capture() as capture:
        console.print(live_table(stats))
    row = next(line for line in capture.get().splitlines() if "ocr" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        *("ocr", "400", "45", "5", "30", "10", "120", "–", "6.0", "75.0 %")
    ]
    assert "5 of 10 s" in capture.get()
