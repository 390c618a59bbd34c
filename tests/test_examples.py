"""The examples run as they are; the demo's step is planned (`make demo` trains it)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_quickstart_trains_and_explains_on_eight_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    printed = run("examples/quickstart.py")
    assert "for 8 cpu-host devices" in printed
    assert "Predicted step time" in printed
    assert re.findall(r"^loss ", printed, re.M) == ["loss "] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("nnx_vision_transformer", "kernel of the first block: (128, 512)"),
        ("equinox_mlp", "still a module: MLP gelu"),
        ("mixture_of_experts", "balance"),
        ("resnet_batch_norm", "accuracy"),
        ("finetune_bert", "loss"),
        ("async_pipeline", "2 stages on 2 + 2 devices, 2bw"),
    ],
)
def test_an_example_trains(name: str, shown: str) -> None:
    """It prints the plan in words, and a loss that falls."""
    printed = run(f"examples/{name}.py")
    losses = [float(number) for number in re.findall(r"(?:loss|error) ([\d.]+)", printed)]
    assert shown in printed
    assert len(losses) > 1 and losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nnx_vision_transformer", "mixture_of_experts"])
def test_an_example_can_be_planned_for_absent_gpus(name: str) -> None:
    options = ("--mesh", "8", "--hardware", "h100-sxm")
    assert "8 h100-sxm devices" in run("-m", "autopar", "plan", f"examples/{name}.py:target", *options)


@pytest.mark.slow
def test_an_agent_calls_both_tools_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    pytest.importorskip("llguidance")
    printed = run("examples/agent.py", "--calls", "2")
    assert re.search(r"^search\((['\"]).+\1\)\n  ['\"][\w-]+\.md: ", printed, re.M)
    assert re.search(r"^fetch\('http://127.0.0.1:\d+/[\w-]+.md'\)\n  ['\"]# ", printed, re.M)
    assert re.search(r"^answer: ", printed, re.M)


@pytest.mark.slow
def test_the_demo_of_inference_serves_and_opens_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make demo-inference` runs, with less training, until Ctrl-C."""
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f"#!/bin/sh\necho $1 >> {opened}\n")
    browser.chmod(0o755)
    environment = {"PYTHONPATH": str(ROOT), "BROWSER": f"{browser} %s", "COLUMNS": "200"}
    command = [sys.executable, "examples/serve.py", "--seconds", "2", "--requests", "6", "--serve"]
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("curl "):
                    break
            found = re.search(r"^page: (http://127.0.0.1:\d+/)$", "".join(lines), re.M)
            assert found is not None, "".join(lines)[-3000:]
            url = found[1]
            body = {"prompt": "def main(", "max_tokens": 40}
            reply = httpx.post(f"{url}v1/completions", json=body, timeout=60).json()
            assert reply["usage"]["completion_tokens"] == 40
            assert opened.read_text() == f"{url}\n"
            assert "<title>" in httpx.get(url).text
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.slow
def test_admm_on_a_parameter_server_finds_the_optimum_of_scikit_learn() -> None:
    from sklearn.linear_model import LogisticRegression

    from examples import admm

    found = re.search(r"60 clocks of 4 workers: objective ([\d.]+)", run("examples/admm.py"))
    x, y = admm.examples()
    fitted = LogisticRegression(l1_ratio=1.0, C=1 / admm.PENALTY, solver="saga", max_iter=20_000, tol=1e-7)
    fitted.fit(x[:, :-1], y)
    weights = np.append(fitted.coef_[0], fitted.intercept_)
    best = np.logaddexp(0, -y * (x @ weights)).sum() + admm.PENALTY * np.abs(weights[:-1]).sum()
    assert found and float(found[1]) == pytest.approx(best, rel=1e-4)


@pytest.mark.slow
def test_the_reward_rises() -> None:
    """A quarter of the rounds, in which answers are sampled and trained on at the same time."""
    told = run("examples/reinforcement.py", "--rounds", "60")
    found = re.search(r"([\d.]+)% of the microbatches ran while.*\nreward: ([\d.]+) at first, ([\d.]+) at last", told)
    assert found is not None, told
    share, first, last = map(float, found.groups())
    assert share > 50
    assert last > first + 0.2


@pytest.mark.slow
def test_servers_and_workers_train_by_one_command() -> None:
    printed = run("examples/parameter_server.py", "ssp(3)")
    assert printed.count(": version 450,") == 2
    accuracies = [float(one) for one in re.findall(r"worker \d: 150 clocks in [\d.]+ s, accuracy ([\d.]+)", printed)]
    assert len(accuracies) == 3 and min(accuracies) > 0.93
    staleness = [
        int(one) for counts in re.findall(r"staleness \{(.*)\}", printed) for one in re.findall(r"(\d+):", counts)
    ]
    assert max(staleness) == 3


@pytest.mark.slow
def test_a_store_survives_by_one_command() -> None:
    printed = run("examples/elastic_store.py")
    assert printed.count("killing ") == 2
    sums = re.findall(r"server (\d): version 120, sum of the weights ([\d.]+)", printed)
    assert len(sums) == 4 and len({*sums}) == 2, "replicas are equal"
    assert min(float(one) for one in re.findall(r"accuracy ([\d.]+)", printed)) > 0.97


@pytest.mark.slow
def test_two_processes_train_by_one_command() -> None:
    assert "2 processes, 8 devices" in run("examples/two_processes.py")


@pytest.mark.slow
def test_two_processes_run_a_stage_each_by_one_command() -> None:
    told = run("examples/pipelined_two_processes.py")
    assert "process 0: layers 0 to 3" in told and "process 1: layers 4 to 7" in told


@pytest.mark.slow
def test_the_demo_can_be_planned_for_absent_gpus() -> None:
    options = ("--devices", "8", "--hardware", "h100-sxm")
    assert "8 h100-sxm devices" in run("-m", "autopar", "plan", "examples/train_gpt.py:target", *options)


@pytest.mark.slow
def test_a_job_survives_a_killed_member_by_one_command() -> None:
    """Kill the member that started worker 2: the example goes on with three, and ends."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "STEPS": "40", "PAUSE": "0.1"}
    command = [sys.executable, "examples/survive.py", "--timeout", "5", "--ahead", "0", "--return-after", "1000"]
    running = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    shown, member = "", 0
    for line in running.stdout:
        shown += line
        if found := re.search(r"worker 2 of 4: pid \d+, member (\d+)", shown):
            member = member or int(found[1])
        if member > 0 and "step 15 " in shown:
            os.kill(member, signal.SIGKILL)
            member = -1
    assert running.wait() == 0
    losses = {int(step): float(loss) for step, loss in re.findall(r"step (\d+)  loss ([\d.]+)", shown)}
    assert "on 3 processes" in shown and losses[40] < losses[5]
