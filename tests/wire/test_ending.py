"""How a query ended, written and read back, and what stands in for it where a server does not say."""

from __future__ import annotations

import pytest

from cotenant.types import ANSWERS, Cause, Outcome
from cotenant.wire.api import InferResult, Status, not_answered, unanswered
from cotenant.wire.codec_grpc import encode_failure
from cotenant.wire.ending import CAUSE_KEY, OUTCOME_KEY, Ending, grpc_ending, http_ending, read_ending
from cotenant.wire.oip import MESSAGES

ENDINGS = [Ending(outcome, cause) for outcome in Outcome for cause in (None, *Cause)]


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_ending_is_read_as_it_was_written(ending: Ending) -> None:
    assert read_ending(dict(ending.pairs())) == ending
    failure = MESSAGES["ModelStreamInferResponse"].FromString(encode_failure("7", "why", ending))
    assert (failure.error_message, failure.infer_response.id) == ("why", "7")
    parameters = failure.infer_response.parameters
    assert read_ending({key: value.string_param for key, value in parameters.items()}) == ending


@pytest.mark.parametrize("told", [{}, {OUTCOME_KEY: ""}, {OUTCOME_KEY: "Rejected"}, {CAUSE_KEY: "unserved"}])
def test_what_is_not_known_is_not_said(told: dict[str, str]) -> None:
    assert read_ending(told) is None
    assert http_ending(503, told) == grpc_ending("UNAVAILABLE", told) == Ending(Outcome.REJECTED)


def test_a_cause_that_is_not_known_leaves_the_outcome() -> None:
    assert read_ending({OUTCOME_KEY: "failed", CAUSE_KEY: "of later"}) == Ending(Outcome.FAILED)


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_said_goes_before_the_status_unless_there_is_no_answer_to_it(ending: Ending) -> None:
    told = dict(ending.pairs())
    for status, by_status in ((503, Outcome.REJECTED), (499, Outcome.CANCELLED), (500, Outcome.FAILED)):
        assert http_ending(status, told) == (Ending(by_status) if ending.outcome in ANSWERS else ending)
    for code, by_code in (("UNAVAILABLE", Outcome.REJECTED), ("CANCELLED", Outcome.CANCELLED), ("OK", Outcome.FAILED)):
        assert grpc_ending(code, told) == (Ending(by_code) if ending.outcome in ANSWERS else ending)


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - set(ANSWERS)))
@pytest.mark.parametrize("ready", [True, False])
def test_a_query_that_the_core_ends_tells_its_outcome(outcome: Outcome, ready: bool) -> None:
    error = not_answered(unanswered(outcome, 1, "1", "why"), ready=ready)
    unserved = outcome is Outcome.REJECTED and not ready
    assert error.ending == Ending(outcome, Cause.UNSERVED if unserved else None)
    assert error.message == "why"
    assert not_answered(InferResult(outcome, 1), ready=ready).status is Status.INTERNAL
