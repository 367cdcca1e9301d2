"""Tenants of benchmarks: their SLOs follow what the models take where a benchmark runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import _tenants
from bench._tenants import ALONE_MS, LEAST_SLO_MS, prepare, scaled_slos_ms
from cotenant.config import load_model_config
from cotenant.zoo.catalogue import ENTRIES, config_text

MS = 1e6


def test_slos_scale_by_latency_and_the_least_ones_stay() -> None:
    assert ALONE_MS.keys() == ENTRIES.keys()
    assert all(len(ALONE_MS[model]) == len(entry.shapes) for model, entry in ENTRIES.items())
    usual = {model: times[-1] * MS for model, times in ALONE_MS.items()}
    assert scaled_slos_ms(usual, -1) == {model: entry.slo_ms for model, entry in ENTRIES.items()}
    twice = scaled_slos_ms({model: 2 * ns for model, ns in usual.items()}, -1)
    for model, entry in ENTRIES.items():
        assert twice[model] == (entry.slo_ms if entry.slo_ms == LEAST_SLO_MS else 2 * entry.slo_ms)
    assert scaled_slos_ms({"minilm": 5.8 * MS}) == {"minilm": 120}


@pytest.mark.parametrize(("shape", "tokens"), [(0, 32), (-1, 128)])
def test_a_repository_has_the_shape_that_is_sent_and_its_slo(
    shape: int, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once more with other latencies, too: the files are kept from run to run."""

    def build(root: Path, *, models: list[str]) -> None:
        for model in models:
            if not (root / model).is_dir():
                (root / model).mkdir()
                (root / model / "config.toml").write_text(config_text(model), encoding="utf-8")

    monkeypatch.setattr(_tenants, "build_repository", build)
    usual_ms = ALONE_MS["minilm"][shape]
    for times in (2, 3):
        monkeypatch.setattr(_tenants, "core_times", lambda *_, times=times: {"minilm": times * usual_ms * MS})
        prepare(tmp_path, ["minilm"], "", True, shape)
        config = load_model_config(tmp_path / "minilm" / "config.toml")
        assert config.tenant.slo_ms == 120 * times
        assert config.model.shapes == ({"input_ids": (1, tokens), "attention_mask": (1, tokens)},)
        assert config.segments.max_ms == 10
