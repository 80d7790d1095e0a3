"""Public measurements, each row with its source: what curves of machines that are not here are fitted to."""
