"""The one exception for what a user can cause. The launcher imports nothing of the library that it starts."""


class UserError(Exception):
    """Wrong input. `python -m launch` prints its one line and leaves with status 2."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))  # names and messages that it quotes may have several
