"""Evidence from one CUDA device: predictions, peers, sizes, parity, timelines."""
