"""Curves: from samples of a machine to the time of a case that was not measured, with the error of doing so."""
