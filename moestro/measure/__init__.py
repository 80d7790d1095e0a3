"""Measuring this machine: timings of single operations, of collectives, of storage, of a whole training step."""
