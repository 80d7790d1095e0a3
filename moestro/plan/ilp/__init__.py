"""Placements by integer programs: layers and recomputation, experts, circuits, stages over regions."""
