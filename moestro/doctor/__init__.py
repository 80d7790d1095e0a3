"""The node doctor: is this node fit to join a run, and if not, what is wrong and what mends it."""
