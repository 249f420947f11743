"""Section 9: `plan`, the pure function that says what a host does next."""

from __future__ import annotations


import pytest
from hypothesis import given, settings, strategies as st

from llmguard import NEVER, Situation, Step, plan, replace

NOW = 1000.0


def at(**more) -> Situation:
    return Situation(now=NOW, look_due=NOW + 30, **more)


@pytest.mark.parametrize(
    ("promise", "situation", "step"),
    [
        ("nothing to do: rest until the next look", at(), Step("rest", until=NOW + 30)),
        ("a look that is due comes first", replace(at(queue=("a",), up="a"), look_due=NOW), Step("look")),
        ("a look is due from the very second on", replace(at(), look_due=NOW + 0.001), Step("rest", until=NOW + 0.001)),
        ("nobody waits, something is up: rest until it is idle or looked at", at(up="a", idle_due=NOW + 10), Step("rest", until=NOW + 10)),
        ("the look comes before the idle stop", at(up="a", idle_due=NOW + 40), Step("rest", until=NOW + 30)),
        ("wanted and nothing up: start it", at(queue=("a",)), Step("switch", "a")),
        ("wanted and up: let them in", at(up="a", queue=("a", "a")), Step("grant", "a")),
        ("wanted and up, with others in flight: let them in", at(up="a", in_flight=3, queue=("a",)), Step("grant", "a")),
        ("another one is wanted and nothing runs: switch", at(up="a", queue=("b",)), Step("switch", "b")),
        ("another one is wanted and something runs: drain", at(up="a", in_flight=1, queue=("b",)), Step("rest", until=NOW + 30)),
        ("newcomers for what is up wait behind another one", at(up="a", in_flight=1, queue=("b", "a", "a")), Step("rest", until=NOW + 30)),
        ("the oldest is served first", at(up="a", queue=("b", "a")), Step("switch", "b")),
        ("the oldest is served first, also when it is the one that is up", at(up="a", queue=("a", "b")), Step("grant", "a")),
        ("others use it beside us: do not switch, ask again later", at(up="a", queue=("b",), in_use_until=NOW + 1), Step("rest", until=NOW + 1)),
        ("others used it: ask again from the very second on", at(up="a", queue=("b",), in_use_until=NOW), Step("switch", "b")),
        ("others use it: no reason not to let in who wants the same", at(up="a", queue=("a",), in_use_until=NOW + 1), Step("grant", "a")),
        ("idle for long enough: stop", at(up="a", idle_due=NOW), Step("stop", "a")),
        ("a moment before: not yet", at(up="a", idle_due=NOW + 0.001), Step("rest", until=NOW + 0.001)),
        ("idle by our count, in use by others: not yet", at(up="a", idle_due=NOW - 1, in_use_until=NOW + 1), Step("rest", until=NOW + 1)),
        ("an unload stops what is idle", at(up="a", unload=True), Step("stop", "a")),
        ("an unload waits for what runs", at(up="a", unload=True, in_flight=1), Step("rest", until=NOW + 30)),
        ("an unload comes before newcomers", at(up="a", unload=True, queue=("a",)), Step("stop", "a")),
        ("an unload and another engine wanted: one switch does both", at(up="a", unload=True, queue=("b",)), Step("switch", "b")),
        ("an unload of what is not up is nothing to do", at(unload=True), Step("rest", until=NOW + 30)),
        ("failed a moment ago: refused from memory", at(queue=("a",), backoff=(("a", NOW + 5),)), Step("refuse", "a")),
        ("tried again from the very second on", at(queue=("a",), backoff=(("a", NOW),)), Step("switch", "a")),
        ("one that failed does not hold up the others", at(queue=("b", "a"), backoff=(("a", NOW + 5),)), Step("refuse", "a")),
        ("a failure that nobody asks about is nothing to do", at(backoff=(("a", NOW + 5),)), Step("rest", until=NOW + 30)),
        ("a box that is being woken is not sent a start", at(queue=("a",), waking=True), Step("rest", until=NOW + 30)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_plan(promise, situation, step):
    assert plan(situation) == step, promise


ENGINES = ("a", "b", "c")
engine = st.sampled_from(ENGINES)
instant = st.one_of(st.just(NEVER), st.floats(NOW - 50, NOW + 50), st.just(NOW))


@st.composite
def situations(draw) -> Situation:
    """Anything that a host can be in."""
    up = draw(st.none() | engine)
    running = up or draw(st.none() | engine)
    in_flight = draw(st.integers(0, 3)) if running else 0
    return Situation(
        now=NOW,
        up=up,
        running=running,
        release=draw(st.booleans()),
        handover_until=draw(st.floats(NOW - 50, NOW + 50)),
        unfinished=draw(st.booleans()),
        retry_due=draw(st.floats(NOW - 50, NOW + 50)),
        in_flight=in_flight,
        queue=tuple(draw(st.lists(engine, max_size=5))),
        look_due=draw(instant),
        unload=draw(st.booleans()) if up else False,
        idle_due=draw(instant) if up else NEVER,
        in_use_until=draw(st.floats(NOW - 50, NOW + 50)),
        backoff=tuple((name, draw(st.floats(NOW - 50, NOW + 50))) for name in draw(st.sets(engine))),
    )


anything = settings(max_examples=300, deadline=None)


@anything
@given(situations())
def test_nothing_is_stopped_or_switched_while_a_request_is_in_flight(now):
    step = plan(now)
    if now.in_flight and step.kind in ("stop", "switch", "release"):
        assert step.kind == "switch" and now.up is None and step.engine == now.running, "only what runs already may be started"


@anything
@given(situations())
def test_nothing_is_granted_or_started_while_a_job_waits_or_was_handed_the_gpu(now):
    if now.release or now.now < now.handover_until:
        assert plan(now).kind not in ("grant", "switch")
        if now.queue and now.now < now.look_due:
            assert plan(now).kind == "hold", "and nobody is left waiting"


@anything
@given(situations())
def test_only_the_engine_that_is_up_is_granted_and_only_to_those_who_wait(now):
    step = plan(now)
    if step.kind == "grant":
        assert step.engine == now.up and now.queue[0] == step.engine and not now.unload


@anything
@given(situations())
def test_the_oldest_request_decides_what_is_started(now):
    step = plan(now)
    if step.kind == "switch":
        assert step.engine == now.queue[0] and step.engine != now.up


@anything
@given(situations())
def test_what_is_stopped_is_what_is_up_and_only_for_a_reason(now):
    step = plan(now)
    if step.kind == "stop":
        assert step.engine == (now.up or now.running or "")
        assert now.unfinished or (now.up and (now.unload or now.now >= now.idle_due))
    if step.kind == "release":
        assert now.release and step.engine == (now.up or now.running or "")
    if step.kind in ("stop", "switch", "release") and now.up:
        assert now.now >= now.in_use_until, "somebody else was using it a moment ago"


@anything
@given(situations())
def test_a_refusal_is_of_somebody_who_waits_for_an_engine_that_just_failed(now):
    step = plan(now)
    if step.kind == "refuse":
        assert step.engine in now.queue and now.now < dict(now.backoff)[step.engine]


@anything
@given(situations())
def test_nothing_is_done_before_a_look_that_is_due(now):
    assert (plan(now).kind == "look") == (now.now >= now.look_due)


@anything
@given(situations())
def test_a_rest_ends_in_the_future_and_only_nothing_to_wait_for_rests_for_ever(now):
    """Progress: something is done, or a moment is known at which it can be, or an event (a lease given back, a newcomer) is due."""
    step = plan(now)
    if step.kind != "rest":
        return
    assert step.until > now.now
    if step.until == NEVER:
        assert now.look_due == NEVER
        assert now.in_flight or (not now.queue and not now.unload and not now.unfinished and now.idle_due == NEVER)
        assert now.in_flight or not (now.release and now.running)


@anything
@given(situations())
def test_a_rest_ends_when_the_plan_changes_by_itself_not_later(now):
    """Between now and the end of a rest, time alone changes nothing."""
    step = plan(now)
    if step.kind != "rest":
        return
    moments = [now.look_due, now.idle_due, now.in_use_until, now.retry_due, now.handover_until, *(until for _, until in now.backoff)]
    for moment in moments:
        if now.now < moment < step.until:
            assert plan(replace(now, now=moment)).kind == "rest"
    if step.until != NEVER:
        assert plan(replace(now, now=step.until)) != step


@anything
@given(situations())
def test_the_plan_is_a_function_of_the_situation_alone(now):
    assert plan(now) == plan(replace(now))


@settings(max_examples=200, deadline=None)
@given(situations(), st.lists(engine, max_size=6))
def test_everybody_who_waits_is_served_in_the_order_of_the_oldest_of_each_engine(now, newcomers):
    """Carry the plan out, with a newcomer before every step: each is granted, and no engine is switched to twice for the same queue."""
    now = replace(now, look_due=NEVER, backoff=(), unload=False, release=False, handover_until=0.0, unfinished=False, running=now.up)
    now = now if now.up else replace(now, in_flight=0)
    first = list(now.queue)
    switches: list[str] = []
    newcomers = list(newcomers)
    for _ in range(60):
        if newcomers:
            now = replace(now, queue=(*now.queue, newcomers.pop()))
        step = plan(now)
        if step.kind == "grant":
            now = replace(now, queue=tuple(name for name in now.queue if name != step.engine), in_flight=now.in_flight + 1, idle_due=NEVER)
            first = [name for name in first if name != step.engine]
        elif step.kind == "switch":
            switches.append(step.engine)
            if first:
                assert step.engine == first[0], "a newcomer was served before somebody who waited already"
            now = replace(now, up=step.engine, running=step.engine, idle_due=NEVER)
        elif step.kind == "stop":
            now = replace(now, up=None, running=None, idle_due=NEVER)
        elif now.in_flight:
            now = replace(now, in_flight=now.in_flight - 1)
        elif step.until == NEVER:
            break
        else:
            now = replace(now, now=step.until)
    assert not now.queue and not now.in_flight and not first
    assert len(switches) <= 2 * len(ENGINES) + 6
