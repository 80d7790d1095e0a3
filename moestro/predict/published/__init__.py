"""Public training runs, each row with its source."""
