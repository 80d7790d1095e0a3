"""The network, written for one device: it knows nothing of ranks, optimizers or files."""
