"""What a GPU machine is asked once, by one command: `bench/gpu/run.sh`. Needs torch, numpy and msgspec."""
