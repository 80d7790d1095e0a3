"""The one exception a user should ever meet."""


class MoestroError(Exception):
    """A mistake the user can mend: the message says what is wrong, where, and what to do.

    The command line prints it in one or two lines and exits with status 2; `--debug` shows the traceback.
    """


class MissingDataError(MoestroError):
    """A file of the training text is not there, or cannot be read."""


class DamagedDataError(MoestroError):
    """The training text is not what it was when it was prepared, or when the run was begun."""


def nearest(word: str, choices: list[str] | tuple[str, ...]) -> str:
    """Return ` Did you mean 'x'?` for the closest of `choices`, or the empty string when none is close."""
    import difflib

    found = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f" Did you mean '{found[0]}'?" if found else ""
