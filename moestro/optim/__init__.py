"""Optimizers, which parameter goes to which, and learning-rate schedules."""
