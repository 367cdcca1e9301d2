"""Values that `[samples]` gives: always of the input's type, in range and shape, or an error that names the key."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotenant.config import SampleSection, load_model_config
from cotenant.errors import ConfigError
from cotenant.graph.datatypes import NUMPY_TYPES
from cotenant.graph.dfg import Tensor
from cotenant.measure.inputs import make_inputs
from cotenant.measure.samples import Samples

SECTIONS = st.one_of(
    st.tuples(st.integers(-300, 300), st.integers(0, 70_000)).map(
        lambda p: SampleSection(integers=(p[0], p[0] + p[1]))
    ),
    st.tuples(st.floats(-5, 5), st.floats(0, 5)).map(lambda p: SampleSection(uniform=(p[0], p[0] + p[1]))),
    st.lists(st.one_of(st.booleans(), st.integers(-300, 300), st.floats(-9, 9), st.text(max_size=3)), min_size=1)
    .map(tuple)
    .map(lambda values: SampleSection(values=values)),
)


@given(
    section=SECTIONS,
    dtype=st.sampled_from([*NUMPY_TYPES, "tensor(string)"]),
    dims=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    rows=st.integers(1, 5),
)
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_values_fit_the_input_or_the_key_is_named(
    section: SampleSection, dtype: str, dims: list[int], rows: int
) -> None:
    tensor = Tensor("x", dtype, None)
    try:
        samples = Samples.read("m", [tensor], {"x": section}, Path())
    except ConfigError as error:
        if "[samples.x]" not in str(error):
            raise
        return
    made = make_inputs([tensor], {"x": dims}, rows, True, samples)["x"]
    assert made.shape == (rows, *dims[1:])
    if section.values is not None:
        assert made.ravel()[0] == np.array(section.values[:1], made.dtype)[0]
    elif section.integers is not None:
        assert (
            section.integers[0] <= float(made.min()) <= float(made.max()) <= section.integers[1]
            or made.dtype.itemsize < 4
        )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[samples.x]\n", "samples.x has nothing, expected exactly one of file, values, integers, uniform"),
        ("[samples.x]\nvalues = [1]\nuniform = [0, 1]\n", "samples.x has values and uniform, expected exactly one"),
        ("[samples.x]\nintegers = [5, 1]\n", r"samples.x.integers is \[5, 1\], expected two numbers"),
        ("[samples.x]\nintegers = [5]\n", "samples.x.integers"),
        ("[samples.x]\nones = true\n", "samples.x.*`ones`, expected one of file, values, integers, uniform"),
        ("[samples]\nx = 5\n", "samples.x"),
    ],
)
def test_a_wrong_section_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"[tenant]\nslo_ms = 5\n{text}")
    with pytest.raises(ConfigError, match=sentence):
        load_model_config(path)


def test_files_give_their_rows_in_order(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6, dtype=np.int64).reshape(3, 2))
    tensor = Tensor("x", "tensor(int64)", ("batch", 2))
    samples = Samples.read("m", [tensor], {"x": SampleSection(file="x.npy")}, tmp_path)
    assert make_inputs([tensor], {"x": [1, 2]}, 4, True, samples)["x"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]
    for file, sentence in (("../x.npy", "outside"), ("y.npy", "cannot be read"), ("x.csv", "unknown suffix")):
        with pytest.raises(ConfigError, match=rf"\[samples.x\].file: .*{sentence}"):
            Samples.read("m", [tensor], {"x": SampleSection(file=file)}, tmp_path)
