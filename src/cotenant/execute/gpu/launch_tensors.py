"""Input and output tensors of a launch on a stream, for batches that run as one launch or as several tasks."""

from __future__ import annotations

from collections.abc import Collection

import torch

from cotenant.execute.batches import BatchTensors
from cotenant.execute.errors import TensorError
from cotenant.execute.gpu.chains import BatchForm, form_of
from cotenant.execute.gpu.resident import StreamModel
from cotenant.execute.gpu.streams import Named, StreamLane
from cotenant.execute.runner import RowChunks
from cotenant.work import Work

_UNKNOWN = BatchForm((), 0, 0)


def values_of(work: Work, batch: BatchTensors, before: Collection[int], model: StreamModel, lane: StreamLane) -> Named:
    """Tensors that a launch reads: inputs in host memory, or live tensors on the device, joined on this stream.

    Of tensors that other tasks make, only those of launches in `before` are read: the stream waits for them. Raises
    TensorError for inputs of a type that torch lacks, or with an index outside its table. Raises RowsError for tensors
    that do not have one row for each row of the batch.
    """
    tasks = batch.tasks
    if tasks is None:
        return batch.kept if work.start else _gathered(lane, batch.gather(), model)
    form: BatchForm = tasks.form or _UNKNOWN
    if form.held > form.rows:
        tasks.trim(form.held)
    found = tasks.rows(work, before)
    values = found.tensors(model.dfg.segment_io(work.start, work.end)[0] if work.start else None)
    inputs = {name: [value] for name, value in values.items() if not isinstance(value, torch.Tensor)}
    return {**values, **_gathered(lane, inputs, model)}


def form_at(work: Work, values: Named, batch: BatchTensors, max_batch: int) -> BatchForm:
    """The form of the tensors that a launch begins with; a chunk of rows has no padding."""
    if not work.start:
        return form_of(values, work.items, max_batch)
    if batch.tasks is None:
        form: BatchForm = batch.form
        return form
    return (batch.tasks.form or _UNKNOWN).of_rows(work.items)


def results_of(work: Work, batch: BatchTensors, model: StreamModel, form: BatchForm, results: Named) -> Named:
    """Tensors that a launch returns, without padding: of a task the tensors of its units, else all `results`."""
    names = results if batch.tasks is None else model.dfg.segment_io(work.start, work.end)[1]
    return {name: form.without_padding(results[name]) for name in names}


def _gathered(lane: StreamLane, inputs: RowChunks, model: StreamModel) -> Named:
    """Inputs joined in host memory from which the device can copy. Raises TensorError as `StreamModel.check_values`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, arrays in inputs.items():
        try:
            tensors[name] = lane.gather(arrays)
        except TypeError:
            raise TensorError(f"input {name!r} is {arrays[0].dtype}, which torch has no tensors of") from None
    model.check_values(tensors)
    return tensors
