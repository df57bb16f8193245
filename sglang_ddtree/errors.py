"""Errors that a user can act on."""


class DDTreeError(ValueError):
    """Bad input to DDTREE: one line that says what is wrong and what to do.

    A ``ValueError``, because that is what SGLang's own argument checks raise.
    """


def of_the_system(error: OSError) -> str:
    """One line for a path that the system refuses: too long, no permission on the way, a bad disk."""
    where = f"{str(error.filename)[:200]}: " if error.filename is not None else ""
    return f"{where}{error.strerror or error}."
