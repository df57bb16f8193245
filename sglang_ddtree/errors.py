"""Errors that a user can act on."""


class DDTreeError(ValueError):
    """Bad input to DDTREE: one line that says what is wrong and what to do.

    A ``ValueError``, because that is what SGLang's own argument checks raise.
    """
