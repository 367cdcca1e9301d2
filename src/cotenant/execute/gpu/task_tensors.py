"""What a launch on a stream begins with, where its batch runs in parts and where it runs as one."""

from __future__ import annotations

from collections.abc import Collection

import torch

from cotenant.execute.batches import BatchTensors
from cotenant.execute.errors import TensorError
from cotenant.execute.gpu.chains import BatchForm, form_of
from cotenant.execute.gpu.resident import StreamModel
from cotenant.execute.gpu.streams import Named, StreamLane
from cotenant.execute.runner import Pieces
from cotenant.work import Work

_UNKNOWN = BatchForm((), 0, 0)


def values_of(work: Work, batch: BatchTensors, before: Collection[int], model: StreamModel, lane: StreamLane) -> Named:
    """Inputs in memory of the host, or what is live on the device; what has to be put together is, on this stream.

    Of what other parts make, that of launches in `before` is there when the stream comes so far. Raises TensorError for
    inputs that torch has no tensors of, or with an index that ends the device, RowsError where rows are not told apart.
    """
    parts = batch.parts
    if parts is None:
        return batch.kept if work.start else _gathered(lane, batch.gather(), model)
    form: BatchForm = parts.form or _UNKNOWN
    if form.held > form.rows:
        parts.trim(form.held)
    found = parts.rows(work, before)
    values = found.tensors(model.dfg.segment_io(work.start, work.end)[0] if work.start else None)
    inputs = {name: [value] for name, value in values.items() if not isinstance(value, torch.Tensor)}
    return {**values, **_gathered(lane, inputs, model)}


def form_at(work: Work, values: Named, batch: BatchTensors, max_batch: int) -> BatchForm:
    """The form of what a launch begins with: a part of the rows has no padding."""
    if not work.start:
        return form_of(values, work.items, max_batch)
    if batch.parts is None:
        form: BatchForm = batch.form
        return form
    return (batch.parts.form or _UNKNOWN).of_rows(work.items)


def results_of(work: Work, batch: BatchTensors, model: StreamModel, form: BatchForm, results: Named) -> Named:
    """What a launch gives, without padding: a part of a batch what its units make, other launches all `results`."""
    names = results if batch.parts is None else model.dfg.segment_io(work.start, work.end)[1]
    return {name: form.without_padding(results[name]) for name in names}


def _gathered(lane: StreamLane, inputs: Pieces, model: StreamModel) -> Named:
    """Inputs below each other, in memory of the host that the device can copy from, checked for what would end it."""
    tensors: dict[str, torch.Tensor] = {}
    for name, arrays in inputs.items():
        try:
            tensors[name] = lane.gather(arrays)
        except TypeError:
            raise TensorError(f"input {name!r} is {arrays[0].dtype}, which torch has no tensors of") from None
    model.check_values(tensors)
    return tensors
