"""Sections 7 and 9 together: tens of thousands of schedules of the whole hand-back, and proof that the model can fail."""

from __future__ import annotations

import os
import time

import pytest
import sim

import llmguard
from llmguard import Agent, Host, replace

SCHEDULES = int(os.environ.get("LLMGUARD_SCHEDULES", "20000"))


def test_in_no_schedule_is_a_job_met_a_stream_cut_a_wait_forgotten_or_a_stop_sent_in_vain():
    begun = time.monotonic()
    found, total = sim.run_all(0, SCHEDULES)
    seconds = time.monotonic() - begun
    print(f"{SCHEDULES} schedules, {SCHEDULES / seconds:.0f} a second: {dict(sorted(total.items()))}")
    assert not found, "run `python3 tests/sim.py -v 1 SEED` for: " + "; ".join(f"seed {seed}: {error}" for seed, error in found)
    for what in ("served", "GpuBusy", "HostDown", "EngineFailed", "releases", "overlaps", "proxy crashes", "lost"):
        assert total.get(what, 0) > SCHEDULES / 100, f"the schedules hardly ever come to: {what}"


def test_a_schedule_is_a_function_of_its_seed():
    for seed in range(20):
        assert sim.schedule(seed).stats == sim.schedule(seed).stats


# ----- the model can fail: each rule that is taken out is missed


real_situation, real_settle, real_take_waits = Host._situation, Host._settle, Host._take_waits


def no_handover(patch) -> None:
    patch.setattr(Host, "_handing_over", lambda host: False)


def no_handover_after_a_restart(patch) -> None:
    patch.setattr(Host, "_remember", lambda host: None)


def no_settle_window(patch) -> None:
    real = llmguard.queue_owners
    patch.setattr(llmguard, "queue_owners", lambda *args: [owner for owner in real(*args) if owner.kind != "settle"])


def waits_are_no_owners(patch) -> None:
    real = llmguard.queue_owners
    patch.setattr(llmguard, "queue_owners", lambda *args: [owner for owner in real(*args) if owner.kind != "wait"])
    patch.setattr(Host, "_releasing", lambda host: False)


def owners_are_checked_before_the_stop_only(patch) -> None:
    real = Agent._refuse_owners
    checked: list[int] = []

    def once(agent, ask, ours) -> None:
        checked.append(1)
        if len(checked) % 2:
            real(agent, ask, ours)

    patch.setattr(Agent, "_refuse_owners", once)


def waits_are_not_heard(patch) -> None:
    patch.setattr(Host, "_take_waits", lambda host, reply: None)


def a_second_job_behind_the_first_is_forgotten(patch) -> None:
    patch.setattr(Host, "_take_waits", lambda host, reply: real_take_waits(host, {**reply, "bench_waits": reply.get("bench_waits", [])[1:]}))


def engines_tell_only_of_others(patch) -> None:
    patch.setattr(sim.World, "in_use", lambda world, engine: engine in [used for used, _ in world.others.values()])


def streams_count_only_while_the_engine_is_known_to_be_up(patch) -> None:
    engines_tell_only_of_others(patch)

    def situation(host):
        return replace(real_situation(host), in_flight=host._in_flight.get(host._up or "", 0))

    patch.setattr(Host, "_situation", situation)


def streams_do_not_count(patch) -> None:
    engines_tell_only_of_others(patch)
    patch.setattr(Host, "_situation", lambda host: replace(real_situation(host), in_flight=0))


def nobody_asks_the_engine(patch) -> None:
    patch.setattr(sim.World, "in_use", lambda world, engine: False)


def a_stop_is_not_proven(patch) -> None:
    patch.setattr(llmguard, "prove_stopped", lambda *args: None)


def an_unproven_stop_is_forgotten(patch) -> None:
    patch.setattr(Host, "_note_stop", lambda host, problem: None)


def an_engine_that_came_back_is_left_alone(patch) -> None:
    patch.setattr(Host, "_job_runs", lambda host: False)


def whatever_runs_is_stopped_when_idle(patch) -> None:
    def situation(host):
        return replace(real_situation(host), idle_due=host._last_ended + 10.0 if host._up else llmguard.NEVER)

    patch.setattr(Host, "_situation", situation)


def a_release_repeats(patch) -> None:
    patch.setattr(Host, "_situation", lambda host: replace(real_situation(host), running=host._active or "mainline"))


def an_end_of_a_stream_wakes_nobody(patch) -> None:
    def ended(host, engine) -> None:
        host._in_flight[engine] = host._in_flight[engine]

    patch.setattr(Host, "ended", ended)


@pytest.mark.parametrize(
    ("mutation", "says"),
    [
        (no_handover, "in the handover"),
        (no_handover_after_a_restart, "in the handover"),
        (no_settle_window, "in the settle window"),
        (waits_are_no_owners, "waiting job"),
        (owners_are_checked_before_the_stop_only, "an engine is started"),
        (waits_are_not_heard, "still wait"),
        (a_second_job_behind_the_first_is_forgotten, "still wait"),
        (streams_count_only_while_the_engine_is_known_to_be_up, "cuts a stream"),
        (streams_do_not_count, "cuts a stream"),
        (nobody_asks_the_engine, "beside the proxy"),
        (a_stop_is_not_proven, "was there when the stop ended"),
        (an_unproven_stop_is_forgotten, "before the next tick"),
        (an_engine_that_came_back_is_left_alone, "stays beside job"),
        (whatever_runs_is_stopped_when_idle, "neither started nor used"),
        (a_release_repeats, "without an engine of ours"),
        (an_end_of_a_stream_wakes_nobody, "leases are lost"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_model_misses_each_rule_that_is_taken_out(mutation, says, monkeypatch):
    mutation(monkeypatch)
    errors = []
    for first in range(0, 3000, 50):
        found, _ = sim.failures(first, 50, most=3)
        errors += [error for _, error in found]
        if any(says in error for error in errors):
            return
    pytest.fail(f"nothing said {says!r} in 3000 schedules, only {errors[:5]}")
