"""What a GPU machine is asked once, by one command: `bench/gpu/run.sh`. Needs torch and numpy, nothing else."""
