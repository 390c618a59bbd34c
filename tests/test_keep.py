"""`autopar keep` with real processes, whose workers need no JAX: kill, freeze, cut off, leave, and another keeper."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import time
from pathlib import Path

import pytest

from autopar.cli.main import main
from autopar.errors import ProcessError
from autopar.membership import link
from autopar.membership.job_keeper import JobKeeper
from autopar.membership.keeper import Keeper
from autopar.membership.link import Link
from autopar.membership.records import Terms
from autopar.membership.state_file import Saved, StateFolder
from autopar.membership.wire import Message, WireError, address_of, listening
from benchmarks.faults.kept_job import KeptJob

PROGRAM = str(Path(__file__).parent / "kept_counter.py")
OPTIONS = ("--timeout", "1.5", "--every", "5", "--ahead", "0", "--return-after", "0.5")


def job_of(folder: Path, steps: int = 10**6, *options: str, members: int = 3, pause_s: float = 0.02) -> KeptJob:
    command = [PROGRAM, str(folder / "log"), str(steps), str(pause_s)]
    return KeptJob(folder, command, *OPTIONS, *options, members=members)


def counts(job: KeptJob) -> list[int]:
    return [one["count"] for one in job.events("start") if one["rank"] == 0]


def test_a_job_survives_a_killed_worker_a_killed_member_and_a_killed_keeper(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.at(10)
        os.kill(job.worker(1)["pid"], signal.SIGKILL)
        job.wait(lambda: len(counts(job)) == 2)
        assert job.worker(0)["step"] >= 10 // 5 * 5 - 5
        assert "was ended by signal 9 (SIGKILL)" in job.text()
        job.at(30)
        job.keeper.kill()
        job.keeper.wait()
        before = job.events("step")[-1]["step"]
        job.start()
        job.at(before + 20)
        assert counts(job) == [3, 3], "the workers ran on"
        os.kill(job.worker(2)["agent"], signal.SIGKILL)
        job.wait(lambda: 2 in counts(job))
        steps = [one["step"] for one in job.events("step")]
        assert set(steps) == set(range(1, max(steps) + 1)), "no step was left out"
        job.keeper.send_signal(signal.SIGTERM)
        assert job.ended() == 0
        assert "ended at the border of step" in job.text()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["pid", "agent"])
def test_a_frozen_process_is_replaced(tmp_path: Path, who: str) -> None:
    with job_of(tmp_path) as job:
        job.at(10)
        frozen = job.worker(1)
        os.kill(frozen[who], signal.SIGSTOP)
        frozen_s = time.time()
        job.wait(lambda: len(counts(job)) == 2)
        assert job.worker(0)["at_s"] - frozen_s > 1.0
        job.wait(lambda: counts(job)[-1] == 3 and job.events("step")[-1]["count"] == 3)
        job.wait(lambda: not job.exists(frozen["pid"]), 10)


@pytest.mark.slow
def test_a_member_leaves_by_a_signal_and_by_a_file(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.at(10)
        os.kill(job.worker(1)["agent"], signal.SIGTERM)
        job.wait(lambda: counts(job)[-1] == 2)
        job.join_another("--notice", str(tmp_path / "notice"))
        job.wait(lambda: counts(job)[-1] == 3)
        (tmp_path / "notice").touch()
        job.wait(lambda: counts(job)[-1] == 2)
        assert "failed" not in job.text()
        steps = [one["step"] for one in job.events("step")]
        assert steps == list(range(1, len(steps) + 1)), "no step was done twice"


@pytest.mark.slow
def test_a_worker_that_computes_without_a_sign_of_life_is_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUSY_AT", "10")
    with job_of(tmp_path, 10**6, "--timeout", "2", members=1) as job:
        job.at(15)
        times = {one["step"]: one["at_s"] for one in job.events("step")}
        assert times[11] - times[10] > 2.0 and counts(job) == [1], job.text()


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_slow_member(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.at(10)
        slow = job.worker(1)
        job.join_another()
        job.wait(lambda: len(counts(job)) == 2)
        assert "is slow, and another-" in job.text()
        job.at(job.events("step")[-1]["step"] + 20)
        members = {one["agent"] for one in job.events("start")[-3:]}
        assert slow["agent"] not in members and len(members) == 3 and counts(job) == [3, 3]


@pytest.mark.slow
def test_a_finished_job_ends_every_process(tmp_path: Path) -> None:
    with job_of(tmp_path, 20) as job:
        assert job.ended() == 0
        assert "the job has finished after step 20" in job.text()
        processes = {one[who] for one in job.events("start") for who in ("pid", "agent")}
        assert not any(map(job.exists, processes))
        assert not (tmp_path / "state" / "keeper.json").exists()


@pytest.mark.slow
def test_a_command_that_does_not_join_ends_the_job(tmp_path: Path) -> None:
    with KeptJob(tmp_path, ["-c", "raise SystemExit(5)"], *OPTIONS, members=2) as job:
        assert job.ended(30) == 2
        assert "the last time with exit code 5, before it called `autopar.join()`" in job.text()


@pytest.mark.slow
def test_connections_without_the_token_or_with_garbage_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_KEEP_TOKEN", "secret")
    with job_of(tmp_path, members=1) as job:
        job.at(5)
        assert not (tmp_path / "state" / "token").exists()
        host, port = job.address.split(":")
        greeting = b'{"token": "wrong"}'
        head = struct.Struct("!4sIQ")
        for sent in (
            head.pack(b"apm1", len(greeting), 0) + greeting,
            head.pack(b"apm1", 1 << 31, 1 << 60),
            b"GET / HTTP/1.1\r\n\r\n" + bytes(64),
        ):
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(sent)
                answer = connection.makefile("rb").read()
                assert b"does not give this job's token" in answer if b"token" in sent else not answer
        job.at(20)
        assert "was refused: it does not give this job's token" in job.text()
        assert len(counts(job)) == 1


def test_options_that_do_not_go_together_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, text in (
        (["keep"], "give the number of members, as in `autopar keep -n 4 -- python train.py`"),
        (["keep", "--join", "a:1", "--state", str(tmp_path)], "give the command that trains"),
        (["keep", "--join", "nowhere", "--state", str(tmp_path), "--", "x"], "an address is `host:port`"),
        (["keep", "-n", "1", "--at", "127.0.0.1:x", "--state", str(tmp_path)], "cannot listen at 127.0.0.1:x"),
        (["keep", "-n", "3", "--least", "4", "--state", str(tmp_path)], "it would never start"),
        (["keep", "-n", "3", "--microbatches", "2", "--state", str(tmp_path)], "3 members need a microbatch each"),
    ):
        assert main(arguments) == 2
        assert text in capsys.readouterr().err


def test_damaged_files_of_the_keeper_are_refused(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    assert folder.read() is None and folder.token() == folder.token()
    assert (tmp_path / "state" / "token").stat().st_mode & 0o077 == 0
    folder.write(Saved("a:1", 3, {}))
    assert folder.read() == Saved("a:1", 3, {})
    for text in (
        b'{"address": 3}',
        b"",
        b"\xff\xfe",
        b'{"address": "a:1", "gen',
        b"[1]",
        b'{"address":"a:1","generation":1,"places":{"a":{}}}',
    ):
        (tmp_path / "state" / "keeper.json").write_bytes(text)
        with pytest.raises(ProcessError, match=r"keeper\.json is damaged"):
            folder.read()
    for token in ("", "short"):
        (tmp_path / "state" / "token").write_text(token)
        with pytest.raises(ProcessError, match=r"the token in .* is damaged"):
            folder.token()


def test_two_keepers_do_not_share_a_folder_or_an_address(tmp_path: Path) -> None:
    terms, shown = Terms(1), list[str]()
    first = JobKeeper(terms, "127.0.0.1:0", StateFolder(tmp_path / "state"), shown.append)
    with pytest.raises(ProcessError, match="another keeper runs with the state in"):
        JobKeeper(terms, "127.0.0.1:0", StateFolder(tmp_path / "state"), shown.append)
    with listening("127.0.0.1:0") as taken:
        other = JobKeeper(terms, address_of(taken), StateFolder(tmp_path / "other"), shown.append)
        with pytest.raises(ProcessError, match=r"cannot listen at .*: another keeper is there"):
            asyncio.run(other.run())
    assert first.token != other.token


class NoRules:
    """Rules of a keeper that nobody may reach."""

    is_over = False

    def heard(self, name: str, report: Message, now_s: float) -> None:
        raise WireError("it cannot be read")

    def closed(self, name: str, now_s: float) -> None: ...

    def tick(self, now_s: float) -> None: ...

    def answer(self, name: str) -> Message:
        return {}


def test_members_of_another_version_or_job_are_told_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(token: str, wait_s: float = 60.0) -> str:
        rules, shown = NoRules(), list[str]()
        server = listening("127.0.0.1:0")
        serving = asyncio.create_task(Keeper(rules, "secret", 5.0, shown.append).serve(server, last_s=0))
        member = Link(address_of(server), token, "a", dict, lambda answer: None, lambda: 5.0, wait_s)
        with pytest.raises(ProcessError) as error:
            await member.run()
        rules.is_over = True
        await serving
        return str(error.value)

    assert "refuses a: it does not give this job's token" in asyncio.run(refused("guess"))
    assert "no keeper has answered at" in asyncio.run(refused("secret", 0.5)), "a report that cannot be read"
    monkeypatch.setattr(link, "__version__", "0.0.9")
    assert "it has version 0.0.9 of autopar, and the keeper" in asyncio.run(refused("secret"))
