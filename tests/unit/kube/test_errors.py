"""Answers as errors, by what the caller can do."""

from __future__ import annotations

import pytest

from migd.kube.errors import (
    ConflictError,
    DeniedError,
    MissingError,
    RefusedError,
    StaleError,
    UnavailableError,
    error_of,
)


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (404, "not found", MissingError),
        (409, "the object has been modified", ConflictError),
        (410, "too old resource version", StaleError),
        (401, "Unauthorized", DeniedError),
        (403, "forbidden", DeniedError),
        (422, "ValidatingAdmissionPolicy 'migd-agent' with binding 'b' denied request: foreign label", DeniedError),
        (422, "is invalid: spec.rules: Required value", RefusedError),
        (422, "the server rejected our request due to an error in our request", ConflictError),
        (422, 'is invalid: metadata.uid: Invalid value: "u": field is immutable', ConflictError),
        (400, "strict decoding error: unknown field", RefusedError),
        (429, "later", UnavailableError),
        (500, "leader changed", UnavailableError),
        (503, "shutting down", UnavailableError),
        (504, "timeout", UnavailableError),
    ],
)
def test_an_answer_becomes_the_error_that_says_what_to_do(code: int, message: str, kind: type):
    error = error_of("PATCH /api/v1/nodes/n", code, {}, {"message": message})
    assert type(error) is kind
    assert str(error) == f"PATCH /api/v1/nodes/n: {code}: {message}"


@pytest.mark.parametrize(
    ("headers", "body", "seconds"),
    [
        ({"Retry-After": "7"}, {}, 7.0),
        ({}, {"details": {"retryAfterSeconds": 10}}, 10.0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, {}, 1.0),
        ({"Retry-After": "-3"}, {}, 0.0),
        ({}, {"details": None}, 1.0),
    ],
)
def test_the_wait_is_what_the_server_asks_for_where_that_is_a_number(headers, body, seconds):
    assert error_of("GET /x", 429, headers, body).retry_after_s == seconds
