"""Programs of `test_dealt_step`, run in each of several processes."""

from __future__ import annotations

import json
import os
import sys

import jax
from several_processes import TOLD

from autopar.api.elastic.run import ElasticRun
from autopar.errors import MicrobatchError
from autopar.membership.records import Place
from benchmarks.faults import fsdp


def run_of(counts: tuple[int, ...]) -> ElasticRun:
    rank = jax.process_index()
    return ElasticRun(Place(1, rank, len(counts), "", None, (), 10, 5.0, microbatches=counts), None)


def dealt(counts: str) -> None:
    run = run_of(tuple(json.loads(counts)))
    step, create_state, shapes = fsdp.model()
    state = run.restore_or_init(step, create_state, jax.random.key(0), batch=shapes)
    losses = []
    for batch in run.batches(lambda start: fsdp.batches(start, 8, run.rows(fsdp.BATCH))):
        state, loss = step(state, batch)
        losses.append(float(loss))
    plain, expected = jax.jit(fsdp.as_written()[0]), []
    wanted = create_state(jax.random.key(0))
    for batch in fsdp.batches(0, 8, slice(0, fsdp.BATCH)):
        wanted, loss = plain(wanted, batch)
        expected.append(float(loss))
    tell({"losses": losses, "expected": expected, "seconds": run._seconds()})


def differently() -> None:
    step, create_state, shapes = fsdp.model()
    try:
        run = run_of((3, 1) if jax.process_index() else (2, 2))
        run.restore_or_init(step, create_state, jax.random.key(0), batch=shapes)
    except MicrobatchError as error:
        tell(str(error))


def tell(value: object) -> None:
    print(TOLD + json.dumps(value), flush=True)


if __name__ == "__main__":
    jax.distributed.initialize(os.environ["COORDINATOR"], int(os.environ["PROCESSES"]), int(os.environ["PROCESS"]))
    {"dealt": dealt, "differently": differently}[sys.argv[1]](*sys.argv[2:])
