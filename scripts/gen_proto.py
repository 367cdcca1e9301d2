"""Compile the protocol's .proto files into the descriptor set that the package loads.

    python scripts/gen_proto.py           # rewrite src/cotenant/wire/oip.binpb
    python scripts/gen_proto.py --check   # exit 1 when it is not current

Needs grpcio-tools; the package itself does not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

WIRE = Path(__file__).resolve().parent.parent / "src" / "cotenant" / "wire"
SOURCES = ("oip.proto", "health.proto", "reflection.proto")
TARGET = WIRE / "oip.binpb"


def compile_protos() -> bytes:
    """Return the serialised FileDescriptorSet of the sources, without source positions."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set.binpb"
        status = protoc.main(["protoc", f"--proto_path={WIRE}", f"--descriptor_set_out={out}", *SOURCES])
        if status != 0:
            raise SystemExit(f"protoc failed with status {status}")
        return out.read_bytes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    compiled = compile_protos()
    if check:
        current = TARGET.exists() and TARGET.read_bytes() == compiled
        print(f"{TARGET.name} is {'current' if current else 'stale: run python scripts/gen_proto.py'}")
        return 0 if current else 1
    TARGET.write_bytes(compiled)
    print(f"wrote {TARGET.name}, {len(compiled)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
