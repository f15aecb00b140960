"""What Azure's refusals mean, by their codes.

Sources: https://learn.microsoft.com/azure/azure-resource-manager/troubleshooting/common-deployment-errors,
https://learn.microsoft.com/troubleshoot/azure/virtual-machines/windows/allocation-failure.
"""

from collections.abc import Callable
from typing import Any

from tasks.providers.rental import Problem, ProviderError

try:
    from azure.core import exceptions as failures
except ImportError as error:
    raise ValueError(f"azure: its clients are missing ({error}). Install them: pip install 'rankwise[azure]'") from None

_PROBLEMS: dict[str, Problem] = {
    "SkuNotAvailable": "capacity",
    "AllocationFailed": "capacity",
    "ZonalAllocationFailed": "capacity",
    "OverconstrainedAllocationRequest": "capacity",
    "OverconstrainedZonalAllocationRequest": "capacity",
    "NotAvailableForSubscription": "capacity",
    "AvailabilityZoneNotSupported": "capacity",
    "SpotPriceGreaterThanProvidedMaxPrice": "capacity",
    "QuotaExceeded": "quota",
    "PublicIPCountLimitReached": "quota",
    "ResourceQuotaExceeded": "quota",
    "ResourceGroupQuotaExceeded": "quota",
    "TooManyRequests": "throttled",
    "SubscriptionRequestsThrottled": "throttled",
    "AuthenticationFailed": "auth",
    "AuthorizationFailed": "auth",
    "LinkedAuthorizationFailed": "auth",
    "ExpiredAuthenticationToken": "auth",
    "InvalidAuthenticationToken": "auth",
    "InvalidAuthenticationTokenTenant": "auth",
    "SubscriptionNotFound": "auth",
    "AnotherOperationInProgress": "transient",
    "RetryableError": "transient",
    "ResourceGroupBeingDeleted": "transient",
}
_STATUS: dict[int, Problem] = {401: "auth", 403: "auth", 429: "throttled", 408: "transient"}
_LOG_IN = "Log in, such as by `az login`, or set AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET"


def call_azure(call: Callable[[], Any]) -> Any:
    """Make a call. Raises ProviderError with the kind of problem."""
    try:
        return call()
    except failures.ClientAuthenticationError as error:
        if error.response is None:  # no token was given out
            raise ProviderError("auth", "", f"azure: {str(error).splitlines()[0]} {_LOG_IN}") from error
        raise _refusal(error) from error
    except failures.HttpResponseError as error:
        raise _refusal(error) from error
    except (failures.ServiceRequestError, failures.ServiceResponseError) as error:
        raise ProviderError("transient", type(error).__name__, str(error)) from error
    except failures.AzureError as error:
        raise ProviderError("invalid", type(error).__name__, str(error)) from error


def _refusal(error: Any) -> ProviderError:
    """Return the refusal of a request or of an operation; quotas come as OperationNotAllowed with a text."""
    code = str(getattr(error.error, "code", None) or "")
    message = str(getattr(error.error, "message", None) or error.message)
    status = int(error.status_code or 0)
    if code == "OperationNotAllowed" and "quota" in message.lower():
        return ProviderError("quota", code, message)
    problem = _PROBLEMS.get(code) or _STATUS.get(status)
    # An operation that has failed is told with status 200: InternalExecutionError, NetworkingInternalOperationError.
    passing = status >= 500 or "Internal" in code
    return ProviderError(problem or ("transient" if passing else "invalid"), code, message)
