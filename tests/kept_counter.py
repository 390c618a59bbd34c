"""A worker of `autopar keep` without JAX: it counts, and all workers of a generation count together, through files.

python kept_counter.py LOG STEPS PAUSE_S
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from pathlib import Path

from autopar.api.elastic.agent_channel import AgentChannel, agent_address
from autopar.membership.wire import Connection


def main(log: str, steps: str, pause_s: str) -> None:
    channel = AgentChannel(agent_address())
    place = channel.place()
    count = 0
    if place.restore is not None:
        connection = Connection.to(place.restore.sources[0][0], {"token": channel.token, "call": "copies"}, 5)
        copy = [place.restore.generation, place.restore.step, 0, len(place.restore.sources)]
        connection.send({"call": "get", "copy": copy, "start": 0, "stop": 1 << 30})
        count = int(connection.receive()[1])
    assert count == (0 if place.restore is None else place.restore.step)

    def tell(event: str) -> None:
        line = {"event": event, "step": count, "count": place.count, "rank": place.rank, "loss": 0.0}
        with Path(log).open("a") as file:
            file.write(json.dumps({**line, "pid": os.getpid(), "agent": os.getppid(), "at_s": time.time()}) + "\n")

    tell("start")
    marks = Path(log).parent / f"generation-{place.generation}"
    marks.mkdir(exist_ok=True)
    while count < int(steps):
        (marks / f"{count}-{place.rank}").touch()  # all meet here, as in a collective
        while not all((marks / f"{count}-{rank}").exists() for rank in range(place.count)):
            time.sleep(0.005)
        time.sleep(float(pause_s))
        if count == int(os.environ.get("BUSY_AT", "-1")):
            sum(range(10**8 * 3))  # in one call, so no other thread of Python runs
        count += 1
        if place.rank == 0:
            tell("step")
        slow = place.rank == 1 and place.generation == 1
        border = channel.at(count, 0.5 if slow else 0.1)
        if count % place.every == 0 or border == count:
            data = str(count).encode()
            for address in place.partners:
                try:
                    connection = Connection.to(address, {"token": channel.token, "call": "copies"}, 1)
                    copy = [place.generation, count, place.rank, place.count]
                    connection.send({"call": "put", "copy": copy, "index": zlib.crc32(data)}, [data])
                    connection.receive()
                    connection.close()
                except OSError:
                    continue
        if border == count:
            channel.end("yielded")
            os._exit(0)
    channel.end("finished")
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
