"""Errors that a client sees."""


class ApiError(Exception):
    """A request that is refused, with the status and the code of the answer."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
