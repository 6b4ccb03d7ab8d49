"""The recovery of a run from lost workers and hosts: it goes back to its last checkpoint with new ones.

Everything that a resumed run reads again is read again here too, so that both end in the same weights. Only what costs
most stays: the data set, and the engines that have lost nothing.
"""

import time
import traceback
from collections.abc import Collection
from dataclasses import replace

from rlflow.compiler import compile_recipe
from rlflow.compiler.plan import Plan, format_duration
from rlflow.errors import EngineError, PlacementError
from rlflow.runtime.checkpoint import checkpoints, remove_unfinished
from rlflow.runtime.preflight import last_checkpoint
from rlflow.runtime.protocols import Lost
from rlflow.runtime.session import Session

# Seconds that a run waits for a lost host, as long as a cluster needs to replace one, and seconds between two looks.
_HOST_WAIT_S = 600.0
_POLL_S = 5.0


def recover(session: Session, error: EngineError) -> None:
    """Replace what a session has lost, so that the run can continue from its last checkpoint.

    Raises ``error`` if nothing was lost or nothing can replace it, for a run that has been asked to stop, and for one
    that comes back to the same checkpoint too often.
    """
    recipe, lost = session.plan.recipe, session.engines.find_lost()
    is_replaceable = not lost.hosts or recipe.elastic or lost.hosts_may_return
    if not lost or not is_replaceable or not recipe.max_restarts or session.stop():
        raise error
    _release_values(error)
    directory, before = session.directory, session.progress.step
    remove_unfinished(directory)
    session.last, progress = last_checkpoint(session.plan, directory, resume=bool(checkpoints(directory)))
    session.progress = replace(progress, data=session.progress.data)
    step, rows = session.progress.step, session.progress.rows
    session.local_data = replace(session.local_data, resumed_at=(step, rows))
    session.returns = session.returns + 1 if session.restarts and step == before else 1
    if session.returns > recipe.max_restarts:
        allowed = f"max_restarts={recipe.max_restarts} allows"
        error.add_note(f"the run has gone back to step {step} as often as {allowed}")
        raise error
    session.restarts += 1
    session.warn(*session.last.damaged if session.last else ())
    _replace(session, lost, error)
    # Ranks that were alive until now may have written on into their part of a checkpoint.
    remove_unfinished(directory)


def _replace(session: Session, lost: Lost, error: EngineError) -> None:
    """Start new workers: on the same hosts, on those that are left, or once lost hosts are back."""

    def note(action: str) -> None:
        names = [f"host '{host}'" for host in lost.hosts] or [name for name in lost.processes if name not in str(error)]
        facts = [f"Lost: {', '.join(names)}."] if names else []
        continues = f"{action}, and the run continues from step {session.progress.step}."
        session.warn(" ".join([str(error), *facts, continues]))

    if not lost.hosts:
        note("New workers start")
        session.engines.restart_lost()
        session.data = session.engines.place_with_tokens(session.local_data)
    elif session.plan.recipe.elastic:
        smaller = _planned_without(session.plan, lost.hosts, error)
        session.runtime.check(smaller)
        note(f"The run is planned again for {smaller.cluster.shape} ({_changes(session.plan, smaller)})")
        session.running.close()
        session.plan = smaller
        session.start()
    else:
        note(f"The run waits {_HOST_WAIT_S / 60:g} minutes for its return (elastic=true continues without it)")
        session.running.close()
        _start_with_all_hosts(session, error)


def _start_with_all_hosts(session: Session, error: EngineError) -> None:
    """Start the engines once all hosts of the plan are there. Raises ``error`` when they do not come back."""
    deadline = time.monotonic() + _HOST_WAIT_S
    while True:
        try:
            return session.start()
        except PlacementError:
            if session.stop() or time.monotonic() >= deadline:
                raise error from None
        time.sleep(_POLL_S)


def _release_values(error: BaseException) -> None:
    """Release the batches of the failed step, which the frames of the error hold: others may wait for their room."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def _planned_without(plan: Plan, lost: Collection[str], error: EngineError) -> Plan:
    """Return a plan for the hosts that are left. Raises EngineError where none fits."""
    hosts = [host for host in plan.cluster.hosts if host.name not in lost]
    if all(host.name == f"host-{index}" for index, host in enumerate(plan.cluster.hosts)):
        # These names stand for any host, as long as their numbers have no gap.
        hosts = [replace(host, name=f"host-{index}") for index, host in enumerate(hosts)]
    try:
        if not hosts:
            raise PlacementError("cluster", "no host is left")
        return compile_recipe(plan.recipe, replace(plan.cluster, hosts=tuple(hosts)), plan.calibration)
    except PlacementError as misfit:
        raise EngineError(f"{error}\n  No plan fits the hosts that are left. {misfit}") from error


def _changes(before: Plan, after: Plan) -> str:
    """Describe the difference of two plans in a few words."""
    gpus = {role: (len(before.roles[role].bundles), len(after.roles[role].bundles)) for role in after.roles}
    roles = [f"{role} on {new} GPUs, was on {old}" for role, (old, new) in gpus.items() if new != old]
    seconds = [format_duration(plan.prediction.step_seconds) for plan in (after, before)]
    return "; ".join([*roles, f"{seconds[0]} per step, was {seconds[1]}"])
