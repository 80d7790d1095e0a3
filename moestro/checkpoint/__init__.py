"""Checkpoints: saved whole or not at all, verified before they are loaded."""
