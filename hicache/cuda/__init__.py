"""HBM and pinned host memory. Nothing of it is loaded unless it is asked for, and no CUDA package before it is used."""
