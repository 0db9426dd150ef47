"""What an error of SQS says of the messages of the request that met it.

botocore's classes and AWS's codes are known here alone, by name: boto3 need not be installed.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from .kombu import text_of

__all__ = ["NOT_KNOWN", "Verdict", "said", "verdict_of"]

#: Added to an error after which the message may be in the queue all the same.
NOT_KNOWN = " (whether SQS has the message is not known)"


class Verdict(Enum):
    """What became of a request, and what may be done next."""

    #: It did not reach SQS, or was refused whatever it said: nothing else will get through either.
    UNUSABLE = auto()
    #: The queue does not exist.
    MISSING = auto()
    #: Refused as a whole, perhaps because of one entry.
    SUSPECT = auto()
    #: Refused as a whole, because of the queue.
    REFUSED = auto()
    #: SQS failed at it: perhaps it did it all the same.
    BROKEN = auto()
    #: The answer was not read.
    UNKNOWN = auto()


#: Before anything of the request is sent.
_NEVER_LEFT = frozenset(
    {
        "ConnectTimeoutError",
        "CredentialRetrievalError",
        "EndpointConnectionError",
        "NoAuthTokenError",
        "NoCredentialsError",
        "PartialCredentialsError",
        "ProxyConnectionError",
        "SSOTokenLoadError",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
    }
)

#: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/CommonErrors.html, and what the
#: older query protocol says for the same.
_CREDENTIALS = frozenset(
    {
        "AuthFailure",
        "ExpiredToken",
        "ExpiredTokenException",
        "IncompleteSignature",
        "IncompleteSignatureException",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidSecurity",
        "InvalidSignatureException",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "RequestExpired",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "UnrecognizedClientException",
    }
)

_MISSING = frozenset(
    {"AWS.SimpleQueueService.NonExistentQueue", "NonExistentQueue", "QueueDoesNotExist"}
)
_THROTTLED = ("throttl", "toomanyrequests", "requestlimit", "slowdown", "overlimit")


def verdict_of(error: BaseException, *, is_begun: bool = True) -> Verdict:
    """Judge an error that botocore or Kombu raised for a request.

    ``is_begun`` says whether something may have been sent that carries a message.
    """
    name = type(error).__name__
    if name in _NEVER_LEFT:
        return Verdict.UNUSABLE
    if name == "ParamValidationError":
        return Verdict.SUSPECT
    response = getattr(error, "response", None)
    if response is None:
        if is_begun:
            return Verdict.UNKNOWN
        is_botocore = any(each.__name__ == "BotoCoreError" for each in type(error).__mro__)
        return Verdict.UNUSABLE if is_botocore or isinstance(error, OSError) else Verdict.REFUSED
    code = str(response.get("Error", {}).get("Code"))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in _CREDENTIALS:
        return Verdict.UNUSABLE
    if code in _MISSING:
        return Verdict.MISSING
    if any(part in code.lower() for part in _THROTTLED) or status == 429:
        return Verdict.REFUSED
    if status >= 500 or status == 408:
        return Verdict.BROKEN
    if status == 403 or code.startswith(("AccessDenied", "Kms", "KMS")):
        return Verdict.REFUSED
    return Verdict.SUSPECT


def said(error: BaseException) -> str:
    """What is stored of an error: nothing that was signed, and no value that the message brought."""
    response: Any = getattr(error, "response", None)
    if response is None:
        return text_of(error)
    found = response.get("Error", {})
    # A refused signature is explained with all that was signed, the session's token among it.
    reason = str(found.get("Message") or "").partition("\n")[0].partition("The Canonical String")[0]
    return f"{found.get('Code')} for {getattr(error, 'operation_name', 'a request')}: {reason.strip()}"
