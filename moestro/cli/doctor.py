"""`moestro doctor`."""


def doctor() -> None:
    """Is this node fit to join a run? Pass and fail lists with reasons and remedies; the exit status is for schedulers."""
