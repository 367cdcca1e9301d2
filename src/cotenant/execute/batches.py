"""Tensors of queries and batches, for every executor: gathers the rows of a batch and scatters its outputs."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cotenant.core.actions import Launch
from cotenant.execute.batch_tasks import BatchTasks, TaskRows
from cotenant.execute.errors import ModelError, RowsError
from cotenant.execute.protocol import MOST_ANSWER_BYTES, Tensors
from cotenant.execute.runner import RowChunks, joined

if TYPE_CHECKING:
    from cotenant.execute.worker.channel import Run

_REASON_CHARS = 300
_TOLERANCE = 1e-2
"""Absolute tolerance, relative to the largest number of an output: kernels of other batch sizes round otherwise."""


class ModelGoneError(RuntimeError):
    """A launch of a model that was unloaded meanwhile, or of a batch of which the tensors were dropped."""

    def __init__(self, tenant: str) -> None:
        super().__init__(f"the model of tenant {tenant!r} is not loaded any more")


class AnswerSizeError(ValueError):
    """The outputs of a launch take more bytes than a response may have."""


class BatchTensors:
    """The tensors of queries that run through a model as one batch, in the order of their rows. Made by `Batches`.

    A query that leaves at a cut stays in `queries`, since its rows stay in the tensors to the end. `kept` are the
    tensors that are live before `unit`, where the batch is paused. `home` is the supervisor of the worker that has
    them, None if they are here. `tasks` is set while several launches run the batch; `task_rows` are the tensors of one
    of them.
    """

    __slots__ = ("_inputs", "_kept", "form", "home", "items", "queries", "rows", "task_rows", "tasks", "unit")

    def __init__(self, launch: Launch | Run, inputs: list[Tensors], home: object = None) -> None:
        self.queries = launch.queries
        self.items = launch.work.items
        self.rows: tuple[int, ...] = (self.items,)
        self._kept: Mapping[str, Any] | TaskRows = {}
        self.home = home
        self.unit = 0
        self.form: Any = None
        """Set by the executor for its next launch of this batch."""
        self.tasks: BatchTasks | None = None
        self.task_rows: TaskRows | None = None
        self._inputs = inputs

    @property
    def kept(self) -> Mapping[str, Any]:
        """Live tensors of a paused batch, by name. The first read joins the tensors that several tasks made."""
        if isinstance(self._kept, TaskRows):
            self._kept = self._kept.tensors()
        return self._kept

    @kept.setter
    def kept(self, tensors: Mapping[str, Any] | TaskRows) -> None:
        self._kept = tensors

    def gather(self) -> RowChunks:
        """The inputs as row chunks, once. Raises RowsError when they do not have the rows of the launch."""
        inputs, self._inputs = self._inputs, []
        if len(inputs) > 1:
            self.rows = tuple(map(_row_count, inputs))
            if sum(self.rows) != self.items or any(
                len(array) != count
                for tensors, count in zip(inputs, self.rows, strict=True)
                for array in tensors.values()
            ):
                raise RowsError(f"inputs of a batch have {self.rows} rows, expected {self.items} in every tensor")
        return {name: [tensors[name] for tensors in inputs] for name in inputs[0]}

    def whole(self) -> Tensors:
        """The inputs with all rows of a tensor in one array. Raises RowsError as `gather` does."""
        if len(self._inputs) == 1:
            return self._inputs.pop()
        return {name: joined(each) for name, each in self.gather().items()}

    def split(self) -> None:
        """Begin the batch as several launches, each of some rows or units. Raises RowsError as `gather` does."""
        self.items = sum(map(_row_count, self._inputs))
        self.tasks = BatchTasks(self.items, self.whole(), 0)

    def scatter(self, outputs: Tensors) -> Iterator[tuple[int, Tensors]]:
        """Each query with its rows of the outputs; a single query has all. Raises RowsError when rows do not fit."""
        if len(self.queries) == 1:
            yield self.queries[0], outputs
            return
        for name, array in outputs.items():
            if array.ndim == 0 or array.shape[0] != self.items:
                text = f"output {name!r} has shape {array.shape}, expected {self.items} rows: set max_batch = 1"
                raise RowsError(text)
        at = 0
        for query, count in zip(self.queries, self.rows, strict=True):
            yield query, {name: array[at : at + count] for name, array in outputs.items()}
            at += count


class Batches:
    """Inputs of queries until they end, outputs until they are taken, and batches between their launches. Thread-safe.

    A caller of `begin` owns the batch: it calls `pause` or `finish`, or drops the batch if the launch fails. Outputs of
    a batch take at most `max_answer_bytes`. With `has_tasks` a batch may run as several launches side by side.
    """

    def __init__(self, *, has_tasks: bool = False) -> None:
        self.max_answer_bytes = MOST_ANSWER_BYTES
        self._has_tasks = has_tasks
        self._inputs: dict[int, Tensors] = {}
        self._outputs: dict[int, Tensors] = {}
        self._paused: dict[int, BatchTensors] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._inputs) + len(self._outputs) + len(self._paused)

    def put(self, query: int, inputs: Tensors) -> None:
        """Keep the inputs of a query until it ends."""
        self._inputs[query] = inputs

    def take(self, query: int) -> Tensors:
        """Return the outputs of a query after its last unit, and forget the query."""
        with self._lock:
            self._inputs.pop(query, None)
            return self._outputs.pop(query)

    def discard(self, query: int) -> None:
        """Forget a query that ended without outputs."""
        with self._lock:
            self._inputs.pop(query, None)
            self._outputs.pop(query, None)

    def begin(self, launch: Launch | Run, home: object = None, inputs: list[Tensors] | None = None) -> BatchTensors:
        """The batch of a launch: a new one at the first unit, else the paused one.

        `home` is the supervisor of the worker that has the tensors, None if they are here. `inputs` are those of a new
        batch that were not `put`. Raises ModelGoneError when no tensors of the batch are kept at `home`. Raises
        RowsError when queries or rows of the launch are not those of the batch, or for one of several tasks without
        `has_tasks`.
        """
        if launch.work.start == 0 and not launch.part:
            return BatchTensors(launch, inputs or [self._inputs[query] for query in launch.queries], home)
        if launch.part and not self._has_tasks:
            raise RowsError("this executor runs a batch as one launch, not as several tasks")
        with self._lock:
            batch = self._paused.get(launch.batch)
            if batch is None and launch.part:
                inputs = inputs or [self._inputs[query] for query in launch.queries]
                batch = self._paused[launch.batch] = BatchTensors(launch, inputs, home)
                batch.split()
            if batch is None or batch.home is not home:
                raise ModelGoneError(launch.work.tenant)
            if launch.part:  # a worker gets all inputs: it knows which task begins first
                if batch.tasks is None:
                    batch.tasks = BatchTasks(batch.items, batch.kept, batch.unit, batch.form)
                if home is not None:
                    return BatchTensors(launch, [batch.tasks.base])
                made = BatchTensors(launch, [])
                made.tasks, made.task_rows = batch.tasks, batch.tasks.rows(launch.work)
                return made
            if batch.tasks is not None:
                batch.kept, batch.form, batch.tasks = batch.tasks.rows(), batch.tasks.form, None
            items = launch.work.items
            if items != batch.items or not set(launch.queries) <= set(batch.queries):
                mine = f"{batch.items} rows of {batch.queries}"
                raise RowsError(f"a launch has {items} rows of queries {launch.queries}, its batch has {mine}")
            del self._paused[launch.batch]
        return batch

    def join(
        self, launch: Launch | Run, names: Collection[str], made: Mapping[str, Any], whole: Mapping[str, Any]
    ) -> tuple[BatchTensors, Mapping[str, Any]] | None:
        """Keep the tensors `made` by one of several launches of a batch, for its rows.

        When all tasks up to the model's end have run, returns the batch with the outputs `names` of all rows; else
        None. `whole` are outputs that are not joined by rows: constants, and outputs that a worker joined. Raises
        RowsError when rows do not fit.
        """
        with self._lock:
            batch = self._paused.get(launch.batch)
            tasks = None if batch is None else batch.tasks
            if batch is None or tasks is None:
                return None  # the batch was released
            if made:
                tasks.submit(launch.work, made, launch.id)
            if not tasks.end(launch, whole):
                return None
            del self._paused[launch.batch]
        return batch, tasks.outputs(names)

    def try_begin(self, launch: Launch) -> BatchTensors | Exception:
        """Like `begin`, but returns the exception: a lane reports it when it reaches the launch."""
        try:
            return self.begin(launch)
        except Exception as error:
            return error

    def pause(self, launch: Launch | Run, batch: BatchTensors, kept: Mapping[str, Any]) -> None:
        """Keep the live tensors of a batch at the cut where its launch ended. Not for batches with several tasks."""
        batch.kept = kept
        batch.unit = launch.work.end
        with self._lock:
            self._paused[launch.batch] = batch

    def finish(self, launch: Launch | Run, batch: BatchTensors, outputs: Tensors) -> None:
        """Keep the outputs of a batch until they are taken, except those of queries that have ended.

        If the batch had several tasks, `batch` and `outputs` come from `join`. Raises RowsError when rows do not fit,
        AnswerSizeError when the outputs are too large; then no output is kept.
        """
        self.check_answer(outputs)
        answers = dict(batch.scatter(outputs))
        with self._lock:
            self._outputs.update({query: tensors for query, tensors in answers.items() if query in self._inputs})

    def check_answer(self, outputs: Tensors) -> None:
        """Raise AnswerSizeError when the outputs take more than `max_answer_bytes`."""
        size = sum([array.nbytes for array in outputs.values()])
        size += sum([sum(map(len, array.ravel())) for array in outputs.values() if array.dtype.kind == "O"])
        if size > self.max_answer_bytes:
            raise AnswerSizeError(
                f"the response has {size} bytes, expected at most {self.max_answer_bytes}: request less, or raise "
                "server.max_answer_mib"
            )

    def release(self, batch: int) -> object:
        """Forget a batch; return the supervisor of the worker that keeps its tensors, None if they are here."""
        with self._lock:
            found = self._paused.pop(batch, None)
        return None if found is None else found.home


def row_buckets(max_batch: int) -> tuple[int, ...]:
    """Batch sizes that are measured and prepared: powers of two below the largest batch, and the largest batch."""
    sizes = [1]
    while sizes[-1] * 2 <= max_batch:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes if sizes[-1] == max_batch else [*sizes, max_batch])


def _row_count(tensors: Tensors) -> int:
    return len(next(iter(tensors.values()), ()))


def are_alike(expected: Any, got: Any, rtol: float = 0.0) -> bool:
    """Whether two arrays of one output are equal up to the rounding of different kernels.

    `rtol` is an additional relative tolerance. An infinity equals only itself, and is left out of the largest number
    that scales the absolute tolerance.
    """
    if expected.shape != got.shape:
        return False
    if expected.dtype.kind not in "fc":
        return bool((expected == got).all())
    largest = float(np.abs(expected).max(initial=0.0, where=~np.isinf(expected)))
    return bool(np.allclose(expected, got, rtol=rtol, atol=_TOLERANCE * largest, equal_nan=True))


def for_engine(array: Any) -> Any:
    """Inputs as onnxruntime takes them: BYTES tensors become text. Raises ValueError for bytes that are not UTF-8."""
    if not isinstance(array, np.ndarray) or array.dtype.kind != "O":
        return array
    return np.array([_text(item) for item in array.ravel()], dtype=np.object_).reshape(array.shape)


def for_client(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs as front ends take them: text becomes bytes."""
    return {
        name: np.array([_encoded(item) for item in array.ravel()], dtype=np.object_).reshape(array.shape)
        if array.dtype.kind in "OU"
        else array
        for name, array in tensors.items()
    }


def reason_of(error: Exception) -> str:
    """The reason of an error as a sentence for the client, without paths of this machine."""
    text = error.reason if isinstance(error, ModelError) else str(error) or type(error).__name__
    return " ".join(text.split())[:_REASON_CHARS]


def _encoded(item: Any) -> bytes:
    return item if isinstance(item, bytes) else str(item).encode()  # an input that is an output is bytes already


def _text(item: bytes | str) -> str:
    try:
        return item if isinstance(item, str) else item.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("an element of a BYTES input is not UTF-8 text, which this model takes") from None
