"""The product on the device: `cotenant profile`, then `cotenant serve` under a checked load. Table: served.csv.

SECONDS bounds it. A row is a tenant under one way of sharing the device: offered load, attainment, latencies, answers
that differ from those alone. Logs of every command lie beside the table.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from bench.gpu._journal import MeasureError
from bench.gpu.first._base import Script

NAMES = ("resnet50", "bert_base", "mobilenet_v2")
WAYS = {
    "halves, edf": ("shares = [50, 50]\n", "edf"),
    "one lane, edf": ("", "edf"),
    "streams, edf": ('shares = [50, 50]\nsharing = "streams"\n', "edf"),
    "one lane, shares": ("", "shares"),
    "four streams, overlap": ('shares = [25, 25, 25, 25]\nsharing = "streams"\n', "overlap"),
}
"""Lines of [device], and a policy."""
SLO_MS, RATE, LOAD_S = 50.0, 150.0, 6.0
_READY_S, _STOP_S = 90.0, 30.0


class Product:
    """A repository of archives, and the command line run on it."""

    def __init__(self, script: Script, names: Sequence[str]) -> None:
        self.script, self.names = script, names
        self.logs = script.out / "served"
        self.root = self.logs / "models"
        shutil.rmtree(self.logs, ignore_errors=True)
        self.specs: dict[str, Any] = {}
        for name in names:
            self.specs[name] = spec = json.loads((script.models / f"{name}.json").read_text(encoding="utf-8"))
            (self.root / name / "1").mkdir(parents=True)
            shutil.copy(script.models / f"{name}.pt2", self.root / name / "1" / "model.pt2")
            text = f"[tenant]\nslo_ms = {SLO_MS}\n[model]\nmax_batch = {8 if spec['batched'] else 1}\n"
            for key, limit in spec["limits"].items():
                text += f"[samples.{key}]\nintegers = [0, {limit - 1}]\n"
            (self.root / name / "config.toml").write_text(text, encoding="utf-8")
        rate = 20.0 if script.quick else RATE
        tables = "".join(f'[[tenant]]\nmodel = "{name}"\nrate = {rate}\n' for name in names)
        self.workload = self.logs / "workload.toml"
        text = f"seed = 1\nduration_s = {2.0 if script.quick else LOAD_S}\nwarmup_s = 0.5\n{tables}"
        self.workload.write_text(text, encoding="utf-8")
        self.configure("", "edf", (0, 0))

    def configure(self, lines: str, policy: str, ports: tuple[int, int]) -> None:
        """Write `cotenant.toml`; on cores there is nothing to share."""
        device = f'[device]\nkind = "cuda"\n{lines}' if self.script.device.is_gpu else ""
        server = f"[server]\nhttp_port = {ports[0]}\ngrpc_port = {ports[1]}\n"
        text = f'{server}{device}[policy]\nname = "{policy}"\n'
        (self.root / "cotenant.toml").write_text(text, encoding="utf-8")

    def command(self, log: str, *words: object, limit_s: float) -> str:
        """Run `cotenant`, give its output. Raises MeasureError with its last line."""
        told = [sys.executable, "-m", "cotenant", *map(str, words)]
        done = subprocess.run(told, capture_output=True, text=True, timeout=limit_s, check=False)
        (self.logs / f"{log}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
        if done.returncode:
            raise MeasureError(f"{log}: status {done.returncode}: {' '.join(done.stderr.split())[-250:]}")
        return done.stdout

    @contextmanager
    def serving(self, log: str, port: int) -> Iterator[dict[str, Any]]:
        """A server that is ready, ended by SIGTERM; the yielded facts get its exit status. Raises MeasureError."""
        facts: dict[str, Any] = {}
        with (self.logs / f"{log}.log").open("w", encoding="utf-8") as file:
            told = [sys.executable, "-m", "cotenant", "serve", str(self.root)]
            server = subprocess.Popen(told, stdout=file, stderr=subprocess.STDOUT)
            try:
                began = time.monotonic()
                while not _is_ready(port):
                    if server.poll() is not None or time.monotonic() - began > _READY_S:
                        raise MeasureError(f"{log}: not ready after {time.monotonic() - began:.0f} s")
                    time.sleep(0.1)
                facts["ready_s"] = round(time.monotonic() - began, 1)
                yield facts
            finally:
                server.send_signal(signal.SIGTERM)
                try:
                    facts["exit"] = server.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    server.kill()
                    facts["exit"] = "killed"

    def serve(self, how: str) -> list[Mapping[str, Any]]:
        """One way of sharing under the load."""
        name = how.replace(", ", "-").replace(" ", "-")
        ports = _free_ports()
        self.configure(*WAYS[how], ports)
        with self.serving(f"serve-{name}", ports[0]) as facts:
            url = f"http://127.0.0.1:{ports[0]}"
            words = ("load", self.workload, "--http", url, "--grpc", f"127.0.0.1:{ports[1]}", "--check", "--json")
            found = json.loads(self.command(f"load-{name}", *words, limit_s=LOAD_S + 40))
            (self.logs / f"metrics-{name}.txt").write_bytes(_get(f"{url}/metrics"))
            facts["beyond"] = self.beyond(url)
        (self.logs / f"load-{name}.json").write_text(json.dumps(found), encoding="utf-8")
        return [{"tenant": key, "figures": json.dumps(value), **facts} for key, value in found["tenants"].items()]

    def beyond(self, url: str) -> str:
        """Statuses of queries with an index beyond its table, and of good ones of every model behind them."""
        told = []
        for at, (name, is_bad) in enumerate(
            [(name, True) for name in self.names] + [(name, False) for name in self.names]
        ):
            spec, kind = self.specs[name], f"{name} {'bad' if is_bad else 'good'}"
            if is_bad and not spec["limits"]:
                continue
            inputs = []
            for key, (dtype, shape) in spec["inputs"].items():
                value = 10**9 + at if is_bad and key in spec["limits"] else 1
                datatype = {"int64": "INT64", "int32": "INT32"}.get(dtype, "FP32")
                inputs.append({"name": key, "shape": shape, "datatype": datatype, "data": [value] * math.prod(shape)})
            body = json.dumps({"inputs": inputs}).encode()
            ask = urllib.request.Request(f"{url}/v2/models/{name}/infer", body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(ask, timeout=20) as answer:
                    told.append(f"{kind} {answer.status}")
            except urllib.error.HTTPError as error:
                told.append(f"{kind} {error.code} {error.read()[:150]!r}")
            except OSError as error:
                told.append(f"{kind} {error}")
        return "; ".join(told)


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return bytes(answer.read())


def _is_ready(port: int) -> bool:
    try:
        return bool(_get(f"http://127.0.0.1:{port}/v2/health/ready") is not None)
    except OSError:
        return False


def _free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        return one.getsockname()[1], two.getsockname()[1]


def main() -> None:
    """Profile, then each way of sharing."""
    script = Script(__doc__, 240.0)
    product = Product(script, script.open(NAMES))
    table = script.table("served", "how tenant ready_s exit figures beyond")
    table.point(partial(profiled, product), how="profile")
    for how in WAYS if script.device.is_gpu else list(WAYS)[:1]:
        if not script.is_over():
            try:
                for row in product.serve(how):
                    table.row(how=how, **row)
            except Exception as error:
                table.fail(error, how=how)


def profiled(product: Product) -> dict[str, Any]:
    """`cotenant profile` of the repository."""
    product.command("profile", "profile", product.root, "--budget", "0.05", limit_s=150)
    return {"figures": product.command("models", "models", product.root, "--json", limit_s=60).strip()[:3000]}


if __name__ == "__main__":
    main()
