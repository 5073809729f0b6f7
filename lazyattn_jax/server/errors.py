"""Errors as clients see them: a status and ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that gets an error as its answer.

    Args:
      status: HTTP status.
      message: what is wrong and what would be right.
      param: the field of the request that is to blame, if one is.
      code: a word for programs to tell errors apart.
      headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object to answer with."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class EngineFault(ApiError):
    """The engine failed while it computed the request."""

    def __init__(self, reason: str) -> None:
        super().__init__(500, f"the engine failed: {reason}", code="engine_fault")


class EngineUnavailable(ApiError):
    """There is no engine to compute the request: loading, failed before, or shutting down."""

    def __init__(self, reason: str, *, code: str) -> None:
        headers = {"retry-after": "5"} if code == "loading" else None
        super().__init__(503, reason, code=code, headers=headers)


class RequestFailed(ApiError):
    """The model computed no usable logits for one request; others are not concerned."""

    def __init__(self) -> None:
        super().__init__(
            500,
            "the model's logits for this request are not all finite numbers",
            code="invalid_logits",
        )


class DeadlineExceeded(ApiError):
    """A request was not finished within its ``timeout``."""

    def __init__(self, seconds: float) -> None:
        message = f"the request was not finished within its timeout of {seconds:g} seconds"
        super().__init__(504, message, param="timeout", code="deadline_exceeded")


class LineFull(ApiError):
    """More requests are waiting than may wait."""

    def __init__(self, waiting: int, most: int, seconds: int) -> None:
        super().__init__(
            429,
            f"{waiting} requests are waiting, at most {most} may (--max-waiting); try again in "
            f"{seconds} seconds",
            code="line_full",
            headers={"retry-after": str(seconds)},
        )
