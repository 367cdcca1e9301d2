"""What a GPU machine is asked once, by one command: `bench/gpu/run.sh`. Needs torch, numpy and msgspec."""

import os

from cotenant.execute.gpu.hardware_queues import use_all_queues

use_all_queues(os.environ)
