# ruff: noqa: N802 -- the names are those of the driver
"""A CUDA driver that is not there: the functions of `cuda.bindings.driver` that shares need, over counted objects.

It holds its callers to the rules of the real one:

- only groups of one split may be joined;
- streams of a green context must not block;
- a context must be current where the driver asks for one;
- nothing is used after it was destroyed.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 915


class Attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


class Sm:
    """An SM resource: the SMs themselves, which the real one keeps to itself, beside what it tells."""

    def __init__(self, sms: Iterable[int], least: int | None, split: object = None) -> None:
        self.sms = tuple(sms)
        self.split = split
        self.sm = SimpleNamespace(smCount=len(self.sms))
        if least is not None:
            self.sm.minSmPartitionSize = least


class FakeCuda:
    """One GPU of `total` SMs in groups of `least`. `say_least` False is what bindings of CUDA 12 look like.

    `refuse` makes the calls of a name fail from a number of calls on.
    """

    CUresult = Status
    CUdevice_attribute = Attribute
    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(
        self,
        total: int = 132,
        least: int = 8,
        *,
        gpus: int = 1,
        version: int = 13000,
        capability: tuple[int, int] = (9, 0),
        say_least: bool = True,
        groups: int | None = None,
    ) -> None:
        self.total, self.least, self.gpus, self.version, self.capability = total, least, gpus, version, capability
        self.say_least, self.groups = say_least, groups
        self.refuse: dict[str, int] = {}
        self.contexts: dict[int, Sm] = {}
        self.streams: dict[int, int] = {}
        """The context of each stream."""
        self.primary = 0
        self.stack: list[int] = []
        self._next = 1000

    # --- the device -------------------------------------------------------------------------------------------------

    def cuInit(self, _flags: int) -> tuple[Any, ...]:
        return (Status.CUDA_SUCCESS,)

    def cuGetErrorString(self, status: int) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, Status(status).name.lower().encode()

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, self.version

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, self.gpus

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, index

    def cuDeviceGetName(self, _length: int, _device: int) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, b"Fake GPU\0\0"

    def cuDeviceTotalMem(self, _device: int) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, 80 << 30

    def cuDeviceGetAttribute(self, attribute: Attribute, _device: int) -> tuple[Any, ...]:
        values = {
            Attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: self.total,
            Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: self.capability[0],
            Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: self.capability[1],
        }
        return Status.CUDA_SUCCESS, values[attribute]

    def cuDevicePrimaryCtxRetain(self, _device: int) -> tuple[Any, ...]:
        self.primary += 1
        return Status.CUDA_SUCCESS, 1

    def cuDevicePrimaryCtxRelease(self, _device: int) -> tuple[Any, ...]:
        assert self.primary > 0, "released more often than retained"
        self.primary -= 1
        return (Status.CUDA_SUCCESS,)

    def cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        self.stack.append(context)
        return (Status.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return Status.CUDA_SUCCESS, self.stack.pop()

    # --- green contexts ---------------------------------------------------------------------------------------------

    def cuDeviceGetDevResource(self, _device: int, kind: int) -> tuple[Any, ...]:
        assert kind == self.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        return Status.CUDA_SUCCESS, Sm(range(self.total), self.least if self.say_least else None)

    def cuDevSmResourceSplitByCount(self, count: int, resource: Sm, _flags: int, least: int) -> tuple[Any, ...]:
        size = -(-least // self.least) * self.least
        most = self.total // size if self.groups is None else self.groups
        if not count:
            return Status.CUDA_SUCCESS, [], most, Sm((), None)
        if self._refuses("cuDevSmResourceSplitByCount"):
            return Status.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, None, None, None
        made, split = min(count, most), object()
        groups = [Sm(resource.sms[k * size : (k + 1) * size], None, split) for k in range(made)]
        return Status.CUDA_SUCCESS, groups, made, Sm(resource.sms[made * size :], None, split)

    def cuDevResourceGenerateDesc(self, resources: list[Sm], count: int) -> tuple[Any, ...]:
        assert len(resources) == count > 0
        if resources[0].split is None or any(each.split is not resources[0].split for each in resources):
            return Status.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, None
        return Status.CUDA_SUCCESS, Sm((number for each in resources for number in each.sms), None)

    def cuGreenCtxCreate(self, description: Sm, _device: int, flags: int) -> tuple[Any, ...]:
        if flags != self.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM:
            return Status.CUDA_ERROR_INVALID_VALUE, None
        if self._refuses("cuGreenCtxCreate"):
            return Status.CUDA_ERROR_OUT_OF_MEMORY, None
        self.contexts[context := self._new()] = description
        return Status.CUDA_SUCCESS, context

    def cuGreenCtxGetDevResource(self, context: int, _kind: int) -> tuple[Any, ...]:
        if self._refuses("cuGreenCtxGetDevResource"):
            return Status.CUDA_ERROR_INVALID_CONTEXT, None
        return Status.CUDA_SUCCESS, self.contexts[context]

    def cuGreenCtxDestroy(self, context: int) -> tuple[Any, ...]:
        streams = [stream for stream, of in self.streams.items() if of == context]
        assert not streams, "streams are destroyed before their context, which does not do it"
        del self.contexts[context]
        return (Status.CUDA_SUCCESS,)

    # --- streams ----------------------------------------------------------------------------------------------------

    def cuGreenCtxStreamCreate(self, context: int, flags: int, priority: int) -> tuple[Any, ...]:
        if flags != self.CUstream_flags.CU_STREAM_NON_BLOCKING:
            return Status.CUDA_ERROR_INVALID_VALUE, None
        assert context in self.contexts
        assert priority == 0
        if self._refuses("cuGreenCtxStreamCreate"):
            return Status.CUDA_ERROR_OUT_OF_MEMORY, None
        self.streams[stream := self._new()] = context
        return Status.CUDA_SUCCESS, stream

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        if not self.stack or flags != self.CUstream_flags.CU_STREAM_NON_BLOCKING:
            return Status.CUDA_ERROR_INVALID_CONTEXT, None
        self.streams[stream := self._new()] = self.stack[-1]
        return Status.CUDA_SUCCESS, stream

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        assert stream in self.streams
        return (Status.CUDA_SUCCESS,)

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        del self.streams[stream]
        return (Status.CUDA_SUCCESS,)

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _refuses(self, name: str) -> bool:
        """Count the calls down; from the one on that was named, they fail."""
        if name not in self.refuse:
            return False
        self.refuse[name] -= 1
        return self.refuse[name] < 0
