"""What EC2's refusals mean, by their codes.

Source: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html.
"""

from collections.abc import Callable
from typing import Any

import botocore.exceptions as failures  # type: ignore[import-untyped]

from tasks.providers.rental import Problem, ProviderError

_PROBLEMS: dict[str, Problem] = {
    "InsufficientInstanceCapacity": "capacity",
    "InsufficientHostCapacity": "capacity",
    "InsufficientReservedInstanceCapacity": "capacity",
    "InsufficientCapacity": "capacity",
    "UnfulfillableCapacity": "capacity",
    "SpotMaxPriceTooLow": "capacity",
    "Unsupported": "capacity",  # not offered in this zone
    "VcpuLimitExceeded": "quota",
    "InstanceLimitExceeded": "quota",
    "MaxSpotInstanceCountExceeded": "quota",
    "SecurityGroupLimitExceeded": "quota",
    "RequestLimitExceeded": "throttled",
    "Throttling": "throttled",
    "ThrottlingException": "throttled",
    "RequestThrottled": "throttled",
    "EC2ThrottledException": "throttled",
    "AuthFailure": "auth",
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": "auth",  # of an account without a spot instance so far
    "UnauthorizedOperation": "auth",
    "ExpiredToken": "auth",
    "RequestExpired": "auth",
    "InvalidClientTokenId": "auth",
    "SignatureDoesNotMatch": "auth",
    "OptInRequired": "auth",
    "InvalidGroup.NotFound": "transient",  # what was made a moment ago is not known everywhere yet
    "InvalidSecurityGroupID.NotFound": "transient",
    "InvalidPlacementGroup.Unknown": "transient",
    "InternalError": "transient",
    "InternalFailure": "transient",
    "Unavailable": "transient",
    "ServiceUnavailable": "transient",
}


def call_aws(call: Callable[[], Any]) -> Any:
    """Make a call. Raises ProviderError with the kind of problem."""
    try:
        return call()
    except failures.ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        message = str(error.response.get("Error", {}).get("Message", error))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        raise ProviderError(_problem(code, status, message), code, message) from error
    except (failures.NoCredentialsError, failures.PartialCredentialsError) as error:
        remedy = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
        raise ProviderError("auth", "", f"aws: {error}. {remedy}") from error
    except (failures.SSOError, failures.TokenRetrievalError, failures.CredentialRetrievalError) as error:
        raise ProviderError("auth", "", f"aws: {error}") from error
    except (failures.ConnectionError, failures.HTTPClientError) as error:
        raise ProviderError("transient", type(error).__name__, str(error)) from error
    except failures.BotoCoreError as error:
        raise ProviderError("invalid", type(error).__name__, str(error)) from error


def _problem(code: str, status: int, message: str) -> Problem:
    """Return the problem of a code, by its form where it is none of those above: EC2 has a limit for each kind."""
    if code in _PROBLEMS:
        return _PROBLEMS[code]
    if code.startswith("Insufficient"):  # InsufficientFreeAddressesInSubnet, InsufficientVolumeCapacity
        return "capacity"
    if message.startswith("No default subnet for availability zone"):  # as of zones that were opened later
        return "capacity"
    if code.endswith("LimitExceeded"):  # VolumeLimitExceeded, NetworkInterfaceLimitExceeded
        return "quota"
    return "transient" if status >= 500 else "invalid"
