"""What needs a GPU to be measured. `benchmarks/gpu_check.sh` runs all of it; without a GPU it can only be tried out."""
