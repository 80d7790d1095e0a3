"""Never lose a run: what goes wrong, how it is answered, and the proof that it is."""
