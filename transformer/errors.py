"""The one exception for what a user can cause: a single line that says what, where and what to do."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Wrong input. The command line prints its one line and leaves with status 2."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))  # names and messages that it quotes may have several


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """' (did you mean ...?)' with the nearest choice, or the list of choices where none is near."""
    choices = sorted(set(choices))
    near = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if near:
        return f" (did you mean {near[0]!r}?)"
    return f" (there are: {', '.join(choices)})" if choices else ""
