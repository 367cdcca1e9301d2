#!/bin/sh
# Measures what one GPU gives to several models at once, within 8 minutes. Run it again and it goes on where it stopped.
#
# Needs this repository, and a python3 (3.11 or newer) that has torch (2.11 or newer, CUDA 13), numpy and msgspec (one
# wheel that needs no other: installed, or unpacked in a folder of PYTHONPATH). Nothing is fetched or installed. Green
# contexts also need cuda-bindings, which comes with torch's CUDA wheels; where it is missing shares are plain streams,
# and the results say so. Another interpreter: PYTHON=/path/to/python bench/gpu/run.sh
#
# Results go to profiles/<device>/, and once more into one file there, results.tgz. Options: bench/gpu/run.sh --help
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"
PYTHONUNBUFFERED=1
export PYTHONPATH PYTHONUNBUFFERED
for package in torch numpy msgspec; do
    "$PYTHON" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$package') is None)" || {
        echo "bench/gpu: $PYTHON has no $package: choose another interpreter with PYTHON=..." >&2
        exit 2
    }
done
exec "$PYTHON" -m bench.gpu "$@"
