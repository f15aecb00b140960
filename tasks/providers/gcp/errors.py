"""What Google Cloud refuses, as problems of the seam: exceptions of its client, and errors of operations.

Codes: https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-vm-creation,
https://cloud.google.com/compute/docs/resource-error (capacity), https://cloud.google.com/compute/docs/api/errors.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import google.api_core.exceptions as failures
import google.auth.exceptions as sign_in
import requests

from tasks.providers.rental import Problem, ProviderError

_PROBLEMS: dict[str, Problem] = {
    "ZONE_RESOURCE_POOL_EXHAUSTED": "capacity",
    "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS": "capacity",
    "REGION_RESOURCE_POOL_EXHAUSTED": "capacity",
    "RESOURCE_POOL_EXHAUSTED": "capacity",
    "STOCKOUT": "capacity",
    "VM_MIN_COUNT_NOT_REACHED": "capacity",
    "QUOTA_EXCEEDED": "quota",
    "quotaExceeded": "quota",
    "LIMIT_EXCEEDED": "quota",
    "rateLimitExceeded": "throttled",
    "userRateLimitExceeded": "throttled",
    "RATE_LIMIT_EXCEEDED": "throttled",
    "RESOURCE_OPERATION_RATE_EXCEEDED": "throttled",
    "INTERNAL_ERROR": "transient",
    "resourceNotReady": "transient",
    "RESOURCE_NOT_READY": "transient",
    "PERMISSIONS_ERROR": "auth",
}
_GRAVEST: tuple[Problem, ...] = ("auth", "invalid", "quota", "throttled", "transient", "capacity")
"""Where an operation on several machines names several problems: `quota` rules out more places than `capacity`."""
_REMEDY = "Run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS, and GOOGLE_CLOUD_PROJECT"


def missing_project() -> ProviderError:
    """Return the error of credentials that belong to no project."""
    return ProviderError("auth", "", f"gcp: no project. {_REMEDY}")


def operation_failed(errors: Sequence[tuple[str, str]], status: int) -> ProviderError:
    """Return the error of an operation: codes and messages, and its HTTP status (0: unknown)."""
    found = [(_problem(code, message, status), code, message) for code, message in errors]
    if not found:
        return ProviderError(_problem("", "", status), str(status), "the operation failed without a reason")
    problem, code, message = min(found, key=lambda entry: _GRAVEST.index(entry[0]))
    return ProviderError(problem, code, message)


@contextmanager
def translated() -> Iterator[None]:
    """Turn what the client raises into ProviderError."""
    try:
        yield
    except failures.GoogleAPICallError as error:
        status = int(error.code or 0)
        reasons = [str(entry.get("reason", "")) for entry in error.errors if isinstance(entry, dict)]
        code = next((reason for reason in reasons if reason), str(status))
        raise ProviderError(_problem(code, error.message, status), code, error.message) from error
    except sign_in.DefaultCredentialsError as error:
        # Where a file is named, the client says what is wrong with it.
        named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        why = f"GOOGLE_APPLICATION_CREDENTIALS: {error}" if named else "no credentials."
        raise ProviderError("auth", "", f"gcp: {why} {_REMEDY}") from error
    except sign_in.TransportError as error:
        raise ProviderError("transient", type(error).__name__, str(error)) from error
    except sign_in.GoogleAuthError as error:
        problem: Problem = "transient" if error.retryable else "auth"
        raise ProviderError(problem, type(error).__name__, str(error)) from error
    except (requests.RequestException, failures.RetryError) as error:
        raise ProviderError("transient", type(error).__name__, str(error)) from error


def _problem(code: str, message: str, status: int) -> Problem:
    if code in _PROBLEMS:
        return _PROBLEMS[code]
    if "RESOURCE_POOL_EXHAUSTED" in message or "does not have enough resources" in message:
        return "capacity"
    if status in (401, 403):
        return "auth"
    if status == 429:
        return "throttled"
    return "transient" if status >= 500 else "invalid"
