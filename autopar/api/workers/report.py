"""Report on a run of workers, and say what their policy costs.

In: a store's report; planned parts and a policy. Out: `WorkersReport`, `WorkersPlan`. Waiting is simulated by the board that the store
runs, with the predicted times of the parts.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

from autopar.api.workers.division import Division
from autopar.api.workers.work import Work
from autopar.planner.request import requested_profile
from autopar.plans.workers_plan import PolicyCost, WorkersPlan
from autopar.report.workers import WorkerRow, WorkersReport
from autopar.versions.consistency.policy import Policy, of_all
from autopar.versions.consistency.simulate import simulate
from autopar.versions.consistency.table import find
from autopar.versions.store_values import StoreReport

#: Iterations of a worker that are simulated.
_ITERATIONS = 200
#: How much longer one worker takes.
_STRAGGLERS = (1.0, 2.0, 5.0)
#: Policies to compare with.
_OTHERS = ("bsp", "async")


def report_of(plan: WorkersPlan, policy: Policy, store: StoreReport) -> WorkersReport:
    """The report on a store's workers."""
    is_bound = math.isfinite(policy.bound) and policy.complete is of_all
    rows = [
        WorkerRow(
            clock=clock,
            staleness=dict(sorted(store.staleness[worker].items())),
            waited_s=store.waits_s[worker],
            pulled_bytes=sum(one.pulled_bytes for (who, _), one in store.traffic.items() if who == worker),
            pushed_bytes=sum(one.pushed_bytes for (who, _), one in store.traffic.items() if who == worker),
        )
        for worker, clock in enumerate(store.clocks)
    ]
    return WorkersReport(
        program=plan.program,
        policy=policy.name,
        num_versions=max(store.versions),
        num_discarded=store.num_discarded,
        bound=int(policy.bound) if is_bound else None,
        workers=tuple(rows),
        plan=plan,
    )


def workers_plan(name: str, policy: Policy, division: Division, work: Work) -> WorkersPlan:
    """The plan of a step, with what its policy costs."""
    profile, size = requested_profile(division.options.get("hardware")), len(division.devices[0])
    others = division.num_workers - 1
    link = profile.host_link if division.num_workers * size <= profile.devices_per_domain else profile.network_link
    num_bytes = (work.pulled_bytes + work.pushed_bytes) / 2
    message_s = others * num_bytes / size / link.bytes_per_s + link.latency_s if others else 0.0
    plan = WorkersPlan(
        program=name,
        policy=policy.name,
        num_workers=division.num_workers,
        period=policy.period,
        hardware=profile.name,
        devices_per_worker=size,
        parts=dict(work.plans),
        pulled_bytes=work.pulled_bytes,
        pushed_bytes=work.pushed_bytes,
        message_s=message_s,
        costs=(),
    )
    policies = [policy, *(other for other in map(find, _OTHERS) if other.name != policy.name)]
    costs = tuple(_cost(one, plan, straggler) for one in policies for straggler in _STRAGGLERS)
    return replace(plan, costs=costs)


def _cost(policy: Policy, plan: WorkersPlan, straggler: float) -> PolicyCost:
    """Simulate a policy. The update delays each clock; it does not delay other workers."""
    count, update_s = plan.num_workers, plan.update_s / policy.period
    slow = [random.Random(number).randrange(count) for number in range(_ITERATIONS * count)]

    def compute_s(worker: int, iteration: int) -> float:
        is_slow = slow[iteration % len(slow)] == worker
        return plan.worker_s * (straggler if is_slow else 1.0) + update_s

    num_clocks = max(_ITERATIONS // policy.period, 1)
    run = simulate(policy, count, num_clocks, compute_s, lambda worker: plan.message_s if worker else 0.0)
    pushed = run.num_applied + run.num_discarded
    return PolicyCost(
        policy=policy.name,
        straggler=straggler,
        batches_per_s=run.num_applied * policy.period / count / run.seconds if run.seconds else math.inf,
        waiting=sum(run.waits_s) / (count * run.seconds) if run.seconds else 0.0,
        most_stale=run.most_stale,
        discarded=run.num_discarded / pushed if pushed else 0.0,
    )
