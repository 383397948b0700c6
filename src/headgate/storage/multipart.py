"""Uploads of S3 in parts: begun by one process, completed by any that knows the upload's id.

Counterpart: ``object_store``, whose library gives no id of an upload. Source: docs/spec/storage.md. Goes to the same
server with the same credentials as obstore does. Never replaces an object.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError
from botocore.session import Session

from headgate.errors import StorageError
from headgate.storage.base import REFUSALS, WRITER, AlreadyExists, Bytes, NotFound, Upload, checked_path, checked_prefix

_UNTRANSLATED = (
    "AWS_ALLOW_INVALID_CERTIFICATES",
    "AWS_PROXY_CA_CERTIFICATE",
    "AWS_PROXY_URL",
    "AWS_REQUEST_PAYER",
    "AWS_S3_EXPRESS",
    "AWS_SERVER_SIDE_ENCRYPTION",
    "AWS_SSE_BUCKET_KEY_ENABLED",
    "AWS_SSE_CUSTOMER_KEY_BASE64",
    "AWS_SSE_KMS_KEY_ID",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
)
"""Settings of obstore that change what it sends or to where, and that are not passed on here."""

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_TOKENS = ("AWS_SESSION_TOKEN", "AWS_TOKEN")
_TRUE = ("1", "on", "t", "true", "y", "yes")

_UNAUTHORIZED = (401, 403)
_PRECONDITION_FAILED = 412
_NOT_FOUND = 404

TRIES_MAX = 7
"""With pauses that grow to 20 s: about half a minute, as with obstore."""

COPIED_BYTES = 1 << 30
"""Bytes that one request copies."""

CONNECTIONS_MAX = 16
"""As many as files that are published at once."""


def open_uploads(url: str, draw_name: Callable[[int], str], process: int) -> S3Uploads | None:
    """Return the uploads below ``url``, or None when the environment has settings that only obstore follows.

    ``draw_name`` draws marks; ``process`` is the id of this process, which shares no connection with others.
    """
    environment = {name.upper(): value for name, value in os.environ.items() if name.upper().startswith("AWS_")}
    if any(_is_set(environment.get(name, "")) for name in _UNTRANSLATED):
        return None
    parts = urlsplit(url)
    prefix = url.partition("://")[2].partition("/")[2].strip("/")
    client = _client(process, TRIES_MAX, tuple(sorted(environment.items())))
    return S3Uploads(url, parts.netloc, prefix, client, draw_name)


def _is_set(value: str) -> bool:
    return value.lower() not in ("", "0", "false", "f", "n", "no", "off")


@functools.lru_cache(maxsize=8)
def _client(process: int, tries_max: int, settings: tuple[tuple[str, str], ...]) -> Any:
    """Return the same client for all that have the same settings in the same process: it has connections."""
    environment = dict(settings)
    is_anonymous = environment.get("AWS_SKIP_SIGNATURE", "").lower() in _TRUE
    config = Config(
        signature_version=UNSIGNED if is_anonymous else None,
        s3={"addressing_style": "path"},
        retries={"mode": "standard", "total_max_attempts": tries_max},
        max_pool_connections=CONNECTIONS_MAX,
        request_checksum_calculation="when_required",  # others' servers do not know the newest checksums
        response_checksum_validation="when_required",
    )
    # obstore does not look into the files of the AWS tools: another identity must not come from there
    nothing: dict[str, tuple[None, None, str | None, None]] = {
        "profile": (None, None, None, None),
        "config_file": (None, None, os.devnull, None),
        "credentials_file": (None, None, os.devnull, None),
    }
    return Session(session_vars=nothing).create_client(
        "s3",
        region_name=_first(environment, _REGIONS) or "us-east-1",
        endpoint_url=_first(environment, _ENDPOINTS),
        aws_access_key_id=environment.get("AWS_ACCESS_KEY_ID"),
        aws_secret_access_key=environment.get("AWS_SECRET_ACCESS_KEY"),
        aws_session_token=_first(environment, _TOKENS),
        config=config,
    )


def _first(environment: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


class S3Uploads:
    """Uploads of objects below one URL. See ``storage.base.Uploads``."""

    def __init__(self, url: str, bucket: str, prefix: str, client: Any, draw_name: Callable[[int], str]) -> None:
        self._url, self._bucket, self._client = url.rstrip("/"), bucket, client
        self._draw_name = draw_name
        self._prefix = f"{prefix}/" if prefix else ""

    def begin(self, path: str) -> Upload:
        return self._begin(path, self._draw_name(8))

    def _begin(self, path: str, mark: str) -> Upload:
        with self._errors("begin the upload of", path):
            found = self._client.create_multipart_upload(**self._object(path), Metadata={WRITER: mark})
            return Upload(str(found["UploadId"]), mark)

    def put_part(self, path: str, upload_id: str, number: int, data: Bytes) -> str:
        with self._errors("put", path):
            found = self._client.upload_part(
                **self._object(path), UploadId=upload_id, PartNumber=number, Body=bytes(data)
            )
            return str(found["ETag"])

    def complete(self, path: str, upload_id: str, etags: Sequence[str]) -> None:
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        with self._errors("complete the upload of", path):
            try:
                self._client.complete_multipart_upload(
                    **self._object(path), UploadId=upload_id, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
                )
            except ClientError as error:
                code, status = _answer(error)
                if code == "NoSuchUpload":
                    raise NotFound(path) from None
                if status == _PRECONDITION_FAILED:
                    raise AlreadyExists(path) from None
                raise

    def copy_if_absent(self, source: str, target: str, size_bytes: int, mark: str) -> None:
        upload = self._begin(target, mark)
        try:
            etags = [
                self._copy_part(source, target, upload.id, number, copied)
                for number, copied in enumerate(_copied_ranges(size_bytes), 1)
            ]
            self.complete(target, upload.id, etags)
        except BaseException:
            # parts of an upload that is neither completed nor aborted stay, and are paid for
            with contextlib.suppress(StorageError):
                self.abort(target, upload.id)
            raise

    def _copy_part(self, source: str, target: str, upload_id: str, number: int, copied: Mapping[str, str]) -> str:
        with self._errors("copy", source):
            try:
                found = self._client.upload_part_copy(
                    **self._object(target),
                    UploadId=upload_id,
                    PartNumber=number,
                    CopySource=self._object(source),
                    **copied,
                )
            except ClientError as error:
                if _answer(error)[1] == _NOT_FOUND:
                    raise NotFound(source) from None
                raise
            return str(found["CopyPartResult"]["ETag"])

    def abort(self, path: str, upload_id: str) -> None:
        with self._errors("abort the upload of", path):
            try:
                self._client.abort_multipart_upload(**self._object(path), UploadId=upload_id)
            except ClientError as error:
                if _answer(error)[0] != "NoSuchUpload":
                    raise

    def list(self, prefix: str) -> list[tuple[str, str]]:
        base = checked_prefix(prefix)
        start = f"{self._prefix}{base}/" if base else self._prefix
        with self._errors("list the uploads below", prefix):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=start)
            found = [(str(one["Key"]), str(one["UploadId"])) for page in pages for one in page.get("Uploads", ())]
        return sorted((key.removeprefix(self._prefix), upload) for key, upload in found)

    def is_open(self, path: str, upload_id: str) -> bool:
        key = self._object(path)["Key"]
        with self._errors("look for the upload of", path):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=key)
            return any(one["UploadId"] == upload_id for page in pages for one in page.get("Uploads", ()))

    def mark(self, path: str) -> str | None:
        with self._errors("look at", path):
            try:
                found = self._client.head_object(**self._object(path))
            except ClientError as error:
                if _answer(error)[1] == _NOT_FOUND:
                    return None
                raise
        return str(found.get("Metadata", {}).get(WRITER, ""))

    def _object(self, path: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + checked_path(path)}

    @contextlib.contextmanager
    def _errors(self, operation: str, path: str) -> Iterator[None]:
        """Raise what botocore raises as ours."""
        where = f"{self._url}/{path}".rstrip("/")
        try:
            yield
        except ClientError as error:
            code, status = _answer(error)
            words = str(error.response.get("Error", {}).get("Message", "")) or "it was refused"
            is_transient = code not in REFUSALS and status not in _UNAUTHORIZED
            if code == "AccessDenied" and error.operation_name == "ListMultipartUploads":
                words = f"it needs the right s3:ListBucketMultipartUploads, or a sink with multipart=False: {words}"
            raise StorageError(operation, where, f"{words.rstrip('.')} ({code})", is_transient=is_transient) from error
        except KeyError as error:  # of a server, or of something between, that is not what it seems
            raise StorageError(operation, where, f"the answer says no {error.args[0]}") from error
        except BotoCoreError as error:
            is_transient = not isinstance(error, NoCredentialsError | PartialCredentialsError)
            raise StorageError(operation, where, str(error).splitlines()[0], is_transient=is_transient) from error


def _copied_ranges(size_bytes: int) -> list[dict[str, str]]:
    """Return what requests say of the parts of a copy: of one part nothing, as S3 takes no range of a small object."""
    if size_bytes <= COPIED_BYTES:
        return [{}]
    starts = range(0, size_bytes, COPIED_BYTES)
    return [{"CopySourceRange": f"bytes={first}-{min(first + COPIED_BYTES, size_bytes) - 1}"} for first in starts]


def _answer(error: ClientError) -> tuple[str, int]:
    """Return the code and the status of the answer that was an error."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(error.response.get("Error", {}).get("Code", "")), int(status)
