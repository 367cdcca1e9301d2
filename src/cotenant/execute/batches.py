"""Whose rows are whose: the tensors of queries and batches, for every executor."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cotenant.core.actions import Launch
from cotenant.execute.errors import ModelError, RowsError
from cotenant.execute.parts import PartRows, Parts
from cotenant.execute.protocol import MOST_ANSWER_BYTES, Tensors
from cotenant.execute.runner import Pieces, joined

if TYPE_CHECKING:
    from cotenant.execute.worker.channel import Run

_REASON_CHARS = 300
_TOLERANCE = 1e-2
"""Of the largest number of an output: other batches take other kernels, which round otherwise."""


class ModelGoneError(RuntimeError):
    """A launch names a model that was unloaded meanwhile, or a batch whose tensors are gone with it."""

    def __init__(self, tenant: str) -> None:
        super().__init__(f"model of {tenant!r} is not loaded any more")


class AnswerSizeError(ValueError):
    """The outputs of a launch take more bytes than an answer may have."""


class BatchTensors:
    """Queries that go through a model as one, from its first launch on, in the order of their rows.

    Those who leave at a cut stay in it, as their rows stay in the tensors to the end. Made by `Batches`. Inputs are put
    below each other, and outputs dealt out, nowhere else. `kept` are the tensors that are live where a paused batch
    stands, before `unit`; `home` is who has them instead, where that is not who has this. `part` are those of one
    launch of several.
    """

    __slots__ = ("_inputs", "_kept", "form", "home", "items", "part", "parts", "queries", "rows", "unit")

    def __init__(self, launch: Launch | Run, inputs: list[Tensors], home: object = None) -> None:
        self.queries = launch.queries
        self.items = launch.work.items
        self.rows: tuple[int, ...] = (self.items,)
        self._kept: Mapping[str, Any] | PartRows = {}
        self.home = home
        self.unit = 0
        self.form: Any = None
        """What an executor notes of it for its next launch."""
        self.parts: Parts | None = None
        self.part: PartRows | None = None
        self._inputs = inputs

    @property
    def kept(self) -> Mapping[str, Any]:
        """See above; what parts have made is put together by who asks for it first."""
        if isinstance(self._kept, PartRows):
            self._kept = self._kept.tensors()
        return self._kept

    @kept.setter
    def kept(self, tensors: Mapping[str, Any] | PartRows) -> None:
        self._kept = tensors

    def gather(self) -> Pieces:
        """The inputs, to be put below each other; once. Raises RowsError when they are not the rows of the launch."""
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
        """As `gather`, with one array of all rows for each tensor."""
        if len(self._inputs) == 1:
            return self._inputs.pop()
        return {name: joined(each) for name, each in self.gather().items()}

    def take_apart(self) -> None:
        """Let several launches, of which each may have some rows alone, begin with the inputs. As `gather` else."""
        self.items = sum(map(_row_count, self._inputs))
        self.parts = Parts(self.items, self.whole(), 0)

    def scatter(self, outputs: Tensors) -> Iterator[tuple[int, Tensors]]:
        """Each query with its rows of the outputs; a single one has them all. Raises RowsError when they do not fit."""
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
    """Inputs of queries until they end, their outputs until they are taken, and the batches between their launches.

    A batch in flight belongs to its launch: who `begin`s it has to `pause` or `finish` it, or drops it when it fails.
    Its outputs take `max_answer_bytes` at most. Thread-safe. With `has_parts` a batch may also run as several launches
    side by side.
    """

    def __init__(self, *, has_parts: bool = False) -> None:
        self.max_answer_bytes = MOST_ANSWER_BYTES
        self._has_parts = has_parts
        self._inputs: dict[int, Tensors] = {}
        self._outputs: dict[int, Tensors] = {}
        self._paused: dict[int, BatchTensors] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._inputs) + len(self._outputs) + len(self._paused)

    def put(self, query: int, inputs: Tensors) -> None:
        """See Executor."""
        self._inputs[query] = inputs

    def take(self, query: int) -> Tensors:
        """See Executor."""
        with self._lock:
            self._inputs.pop(query, None)
            return self._outputs.pop(query)

    def discard(self, query: int) -> None:
        """See Executor."""
        with self._lock:
            self._inputs.pop(query, None)
            self._outputs.pop(query, None)

    def begin(self, launch: Launch | Run, home: object = None, inputs: list[Tensors] | None = None) -> BatchTensors:
        """The batch of a launch that is to run now: a new one at the first unit, else the one that was paused.

        `home` has its tensors, where that is not who asks; `inputs` are those of a new batch that were not put.

        Raises ModelGoneError when nothing is kept of it there, RowsError when the launch is not of its queries and
        rows, or a part of a batch where batches are run as one.
        """
        if launch.work.start == 0 and not launch.part:
            return BatchTensors(launch, inputs or [self._inputs[query] for query in launch.queries], home)
        if launch.part and not self._has_parts:
            raise RowsError("batches are run as one here, not in parts")
        with self._lock:
            batch = self._paused.get(launch.batch)
            if batch is None and launch.part:
                inputs = inputs or [self._inputs[query] for query in launch.queries]
                batch = self._paused[launch.batch] = BatchTensors(launch, inputs, home)
                batch.take_apart()
            if batch is None or batch.home is not home:
                raise ModelGoneError(launch.work.tenant)
            if launch.part:  # who has the tensors elsewhere gets all inputs: which part begins there first, he knows
                if batch.parts is None:
                    batch.parts = Parts(batch.items, batch.kept, batch.unit, batch.form)
                if home is not None:
                    return BatchTensors(launch, [batch.parts.base])
                made = BatchTensors(launch, [])
                made.parts, made.part = batch.parts, batch.parts.rows(launch.work)
                return made
            if batch.parts is not None:
                batch.kept, batch.form, batch.parts = batch.parts.rows(), batch.parts.form, None
            items = launch.work.items
            if items != batch.items or not set(launch.queries) <= set(batch.queries):
                mine = f"{batch.items} rows of {batch.queries}"
                raise RowsError(f"a launch is of {items} rows of queries {launch.queries}, its batch of {mine}")
            del self._paused[launch.batch]
        return batch

    def join(
        self, launch: Launch | Run, names: Collection[str], made: Mapping[str, Any], whole: Mapping[str, Any]
    ) -> tuple[BatchTensors, Mapping[str, Any]] | None:
        """One of several launches of a batch has ended. Keep what its units made, of its rows.

        Gives the batch with the outputs of these names, of all rows, when no part up to the model's end is left; else
        None. They come from the parts and from launches before them. `whole` are outputs that no rows are put together
        of: constants, and those that were joined elsewhere. Raises RowsError when rows cannot be put together.
        """
        with self._lock:
            batch = self._paused.get(launch.batch)
            parts = None if batch is None else batch.parts
            if batch is None or parts is None:
                return None  # the batch was released
            if made:
                parts.submit(launch.work, made, launch.id)
            if not parts.end(launch, whole):
                return None
            del self._paused[launch.batch]
        return batch, parts.outputs(names)

    def try_begin(self, launch: Launch) -> BatchTensors | Exception:
        """As `begin`, with what it raises given back: for executors whose lanes tell of it when its turn comes."""
        try:
            return self.begin(launch)
        except Exception as error:
            return error

    def pause(self, launch: Launch | Run, batch: BatchTensors, kept: Mapping[str, Any]) -> None:
        """A launch has ended at a cut: keep what is live there until the next one. For launches that are no part."""
        batch.kept = kept
        batch.unit = launch.work.end
        with self._lock:
            self._paused[launch.batch] = batch

    def finish(self, launch: Launch | Run, batch: BatchTensors, outputs: Tensors) -> None:
        """Keep the outputs of a batch until they are taken; without those of queries that have ended.

        For a part `join` gives the batch and its outputs. Raises RowsError when they do not fit, AnswerSizeError when
        they are too large: none is kept then.
        """
        self.check_answer(outputs)
        answers = dict(batch.scatter(outputs))
        with self._lock:
            self._outputs.update({query: tensors for query, tensors in answers.items() if query in self._inputs})

    def check_answer(self, outputs: Tensors) -> None:
        """Raises AnswerSizeError when outputs take more than `max_answer_bytes`."""
        size = sum([array.nbytes for array in outputs.values()])
        size += sum([sum(map(len, array.ravel())) for array in outputs.values() if array.dtype.kind == "O"])
        if size > self.max_answer_bytes:
            raise AnswerSizeError(
                f"the answer has {size} bytes, expected at most {self.max_answer_bytes}: ask for less, or raise "
                "server.max_answer_mib"
            )

    def release(self, batch: int) -> object:
        """Forget a batch; gives who keeps its tensors, where they are not here."""
        with self._lock:
            found = self._paused.pop(batch, None)
        return None if found is None else found.home


def row_buckets(max_batch: int) -> tuple[int, ...]:
    """The numbers of rows that are measured and prepared: powers of two up to the largest batch, and that itself."""
    sizes = [1]
    while sizes[-1] * 2 <= max_batch:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes if sizes[-1] == max_batch else [*sizes, max_batch])


def _row_count(tensors: Tensors) -> int:
    return len(next(iter(tensors.values()), ()))


def are_alike(expected: Any, got: Any, rtol: float = 0.0) -> bool:
    """Whether two arrays of one output are the same but for the rounding of other kernels.

    `rtol` is allowed on top, of each number of `got`. An infinity is like nothing but itself, and tells nothing of how
    large the other numbers are.
    """
    if expected.shape != got.shape:
        return False
    if expected.dtype.kind not in "fc":
        return bool((expected == got).all())
    largest = float(np.abs(expected).max(initial=0.0, where=~np.isinf(expected)))
    return bool(np.allclose(expected, got, rtol=rtol, atol=_TOLERANCE * largest, equal_nan=True))


def for_engine(array: Any) -> Any:
    """BYTES tensors hold bytes on the wire and text in onnxruntime. Raises ValueError for what is no text."""
    if not isinstance(array, np.ndarray) or array.dtype.kind != "O":
        return array
    return np.array([_text(item) for item in array.ravel()], dtype=np.object_).reshape(array.shape)


def for_client(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs as they go to the front-ends: text becomes bytes again."""
    return {
        name: np.array([_encoded(item) for item in array.ravel()], dtype=np.object_).reshape(array.shape)
        if array.dtype.kind in "OU"
        else array
        for name, array in tensors.items()
    }


def reason_of(error: Exception) -> str:
    """A sentence for the client, without the paths of this machine."""
    text = error.reason if isinstance(error, ModelError) else str(error) or type(error).__name__
    return " ".join(text.split())[:_REASON_CHARS]


def _encoded(item: Any) -> bytes:
    return item if isinstance(item, bytes) else str(item).encode()  # an input that is an output is bytes already


def _text(item: bytes | str) -> str:
    try:
        return item if isinstance(item, str) else item.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("an element of a BYTES input is not UTF-8 text, which this model takes") from None
