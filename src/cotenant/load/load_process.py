"""The load generator in its own process, since other work in the process would delay its sends."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from cotenant import linux
from cotenant.errors import CotenantError
from cotenant.execute.sched_slice import SHORT_NS, set_slice
from cotenant.load.errors import LoadError
from cotenant.load.generator import Inputs, run_load
from cotenant.load.result import LiveStats, LoadResult
from cotenant.measure.busy import LOAD_PROCESS
from cotenant.workload import Workload


def run_load_process(
    workload: Workload,
    *,
    http_url: str | None = None,
    grpc_url: str | None = None,
    inputs: Inputs | None = None,
    on_tick: Callable[[LiveStats], None] | None = None,
    tick_s: float = 0.5,
    check: bool = False,
) -> LoadResult:
    """Run `run_load` in a new process, and return its result.

    `on_tick` is called in the calling process. The first Ctrl-C stops sending, and the result follows after the last
    responses; the second one raises KeyboardInterrupt.

    Raises LoadError when the server or a model cannot be used, or when the process dies.
    """
    context = multiprocessing.get_context("spawn")
    # Two pipes: a loop that waits for one may make it non-blocking, and results need a blocking one.
    news, teller = context.Pipe(duplex=False)
    orders, commander = context.Pipe(duplex=False)
    arguments = {"http_url": http_url, "grpc_url": grpc_url, "inputs": inputs, "tick_s": tick_s, "check": check}
    process = context.Process(
        target=_child,
        args=(teller, orders, workload, arguments, on_tick is not None),
        name="cotenant-load",
        daemon=True,
    )
    process.start()
    teller.close()
    orders.close()
    try:
        return _receive(news, commander, on_tick)
    finally:
        if process.is_alive():
            process.join(timeout=5)
        if process.is_alive():
            process.terminate()
            process.join()
        news.close()
        commander.close()


def _receive(news: Connection, commander: Connection, on_tick: Callable[[LiveStats], None] | None) -> LoadResult:
    stopping = False
    while True:
        try:
            kind, value = news.recv()
            if kind == "result":
                result: LoadResult = value
                return result
            if kind == "error":
                raise LoadError(value)
            if on_tick is not None:
                on_tick(value)
        except (EOFError, OSError):
            raise LoadError("the load generator's process ended without a result; its error is above") from None
        except KeyboardInterrupt:
            if stopping:
                raise
            stopping = True
            commander.send("stop")


def _child(
    teller: Connection, orders: Connection, workload: Workload, arguments: dict[str, Any], ticking: bool
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent forwards it as a message
    linux.name_process(LOAD_PROCESS)  # so that a server on this machine does not count it as another process
    set_slice(SHORT_NS)  # a server on the same cores keeps them busy, and delays of the generator count as latency
    try:
        result = _runner()(_serve(teller, orders, workload, arguments, ticking))
    except CotenantError as error:
        teller.send(("error", str(error)))
    else:
        teller.send(("result", result))


def _runner() -> Callable[..., LoadResult]:
    try:
        import uvloop
    except ImportError:  # a system without uvloop: slower, not wrong
        return asyncio.run
    return uvloop.run


async def _serve(
    teller: Connection, orders: Connection, workload: Workload, arguments: dict[str, Any], ticking: bool
) -> LoadResult:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def heard() -> None:
        try:
            orders.recv()
        except EOFError:  # the parent process is gone
            loop.remove_reader(orders.fileno())
        stop.set()

    loop.add_reader(orders.fileno(), heard)
    try:
        return await run_load(
            workload, stop=stop, on_tick=(lambda stats: teller.send(("tick", stats))) if ticking else None, **arguments
        )
    finally:
        loop.remove_reader(orders.fileno())
