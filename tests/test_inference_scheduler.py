"""Test the scheduler by simulation: a small model replaces the device and checks every iteration."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated_results import results_of

from autopar.errors import InferenceError
from autopar.inference.kv_cache.page_pool import PagePool
from autopar.inference.kv_cache.page_tables import PagedCache
from autopar.inference.schedule import admission
from autopar.inference.schedule.prefill_chunks import divide_rows
from autopar.inference.schedule.requests import Iteration, Options, Progress, Request, Results, Run
from autopar.inference.schedule.scheduler import Scheduler
from autopar.inference.schedule.speculation_policy import DraftRequest, NGram, Proposer, SpeculationPolicy
from autopar.inference.schedule.stop_strings import TextUntilStop

PAGE = 16
EXAMPLES = 60


def next_token(tokens: Sequence[int]) -> int:
    """The model: the next token depends on all previous tokens."""
    return hash(tuple(tokens)) % 7


def first_seen(length: int, window: int | None) -> int:
    """The first of `length` tokens that the last of them sees."""
    return 0 if window is None else max(0, length - window)


def generated(request: Request, window: int | None = None) -> tuple[int, ...]:
    """The output of the model without a scheduler."""
    tokens = list(request.prompt)
    while len(tokens) - len(request.prompt) < request.max_tokens:
        tokens.append(next_token(tokens[first_seen(len(tokens), window) :]))
        if tokens[-1] in request.stop_tokens:
            break
    return tuple(tokens[len(request.prompt) :])


class Device:
    """Simulated device pages: an iteration's writes stay, whichever sequence they belong to."""

    def __init__(self, page_size: int, num_slots: int, window: int | None = None) -> None:
        self.page_size, self.num_slots, self.window = page_size, num_slots, window
        self.pages: dict[tuple[int, int], int] = {}
        self.last: dict[int, int] = {}  # the last token of each slot

    def run(self, iteration: Iteration, unsound: Sequence[str] = ()) -> Results:
        read = {(target, o): self.pages.get((source, o)) for source, target in iteration.copies for o in range(PAGE)}
        self.pages |= {place: token for place, token in read.items() if token is not None}
        assert not {run.slot for run in iteration.chunks} & set(iteration.decodes.slots.tolist())
        assert len(iteration.chunks) <= iteration.shape.rows
        runs = iteration.runs
        num = len(runs) - len(iteration.chunks)
        found = {
            (run.slot, run.start): self._run(run, iteration, is_chunk=number >= num) for number, run in enumerate(runs)
        }
        return results_of(iteration, self.num_slots, found, unsound)

    def _run(self, run: Run, iteration: Iteration, *, is_chunk: bool) -> list[int]:
        tokens = run.tokens or (self.last[run.slot],)
        if is_chunk:
            assert len(tokens) == run.num_tokens <= iteration.shape.length
        else:
            assert len(tokens) <= iteration.shape.width
        new: list[int] = []
        for at, token in enumerate(tokens, run.start):
            self._write(run, at, token)
        if not run.samples:
            return []
        if len(tokens) > 1 and not is_chunk:
            new = self._verified(run, tokens)
        else:
            steps = run.num_tokens if iteration.shape.steps > 1 else 1
            for step in range(steps):
                before = self._read(run, run.start + len(tokens) + step)
                new.append(next_token(before))
                if step + 1 < steps:
                    self._write(run, run.start + len(tokens) + step, new[-1])
        self.last[run.slot] = new[-1]
        return new

    def _verified(self, run: Run, tokens: Sequence[int]) -> list[int]:
        new: list[int] = []
        for i in range(len(tokens)):
            new.append(next_token(self._read(run, run.start + i + 1)))
            if i + 1 < len(tokens) and new[-1] != tokens[i + 1]:
                break
        return new

    def _write(self, run: Run, at: int, token: int) -> None:
        self.pages[run.pages[at // self.page_size], at % self.page_size] = token

    def _read(self, run: Run, length: int) -> list[int]:
        seen = range(first_seen(length, self.window), length)
        return [self.pages[run.pages[t // self.page_size], t % self.page_size] for t in seen]


class Guess:
    """A proposer from a function of one sequence's tokens and the number of draft tokens."""

    def __init__(self, guess: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        self.guess = guess

    def propose(self, requests: Sequence[DraftRequest]) -> list[Sequence[int]]:
        assert len({each.slot for each in requests}) == len(requests)
        return [self.guess(np.asarray(each.tokens).tolist(), each.max_tokens) for each in requests]


class Served:
    """A run of the scheduler over all requests, with its iterations and page use."""

    def __init__(
        self,
        requests: Sequence[Request],
        options: Options,
        num_pages: int,
        *,
        ahead: int = 0,
        proposer: Proposer | None = None,
        policy: SpeculationPolicy | None = None,
        shares_prefixes: bool = True,
        arrive: int | None = None,
        abort: float = 0.0,
        window: int | None = None,
    ) -> None:
        """Serve the requests.

        Args:
            window: the tokens that each token sees; by default all before it.
            ahead: the number of iterations dispatched before results are applied.
            arrive: the number of requests that arrive per iteration; by default all arrive at once.
            abort: the probability that an iteration aborts a request.
        """
        chance = random.Random(0)
        self.pool, self.window = PagePool(num_pages), window
        cache = PagedCache(self.pool, PAGE, shares_prefixes=shares_prefixes, window=window)
        self.scheduler, device = Scheduler(cache, options, proposer, policy), Device(PAGE, options.num_slots, window)
        most = cache.most_held(options.max_length, options.num_ahead)
        self.tokens: dict[str, list[int]] = {request.name: [] for request in requests}
        self.ended: dict[str, str] = {}
        self.iterations: list[Iteration] = []
        self.runs: list[tuple[Run, ...]] = []
        self.used: list[float] = []
        self.most_held = 0
        waiting, in_flight = deque(requests), deque[tuple[Iteration, Results]]()
        while len(self.ended) < len(requests):
            for _ in range(min(len(waiting), arrive or len(waiting))):
                self.scheduler.submit(waiting.popleft())
            iteration = self.scheduler.next()
            self.pool.check()
            if iteration is not None:
                assert iteration.shape in options.shapes
                runs = iteration.runs
                self.runs.append(runs)
                assert all(self.pool.is_writable(page) for run in runs for page in self._written(run))
                assert len(iteration.copies) <= len({run.slot for run in runs})
                in_flight.append((iteration, device.run(iteration)))
                self.iterations.append(iteration)
                self.most_held = max(self.most_held, self.pool.num_held)
                tables = self.scheduler._admission.page_tables.values()
                assert all(len(table.held) <= most for table in tables)
                if self.pool.num_held:
                    self.used.append(self.scheduler.num_cached_tokens / (self.pool.num_held * PAGE))
            assert iteration is not None or in_flight or waiting, "nothing runs and nothing is in flight"
            if chance.random() < abort and (name := str(chance.randrange(len(requests)))) not in self.ended:
                self.ended |= {name: "aborted"} if self.scheduler.abort(name) else {}
            if len(in_flight) > (ahead if iteration is not None else 0):
                self._take(self.scheduler.update(*in_flight.popleft()).progress())
            assert len(self.iterations) < 100_000

    def _written(self, run: Run) -> tuple[int, ...]:
        """The pages that a run writes."""
        last = run.start + run.num_tokens - 1
        return run.pages[run.start // PAGE : last // PAGE + 1]

    def _take(self, progress: Sequence[Progress]) -> None:
        for each in progress:
            assert each.name not in self.ended
            self.tokens[each.name] += each.tokens
            if each.ended:
                self.ended[each.name] = each.ended

    @property
    def steps(self) -> int:
        """The number of device steps. A call with several steps counts them all."""
        return sum(iteration.shape.steps for iteration in self.iterations)

    def check(self, requests: Sequence[Request]) -> None:
        """Assert that each request has the model's own output, and that no page leaks."""
        for request in requests:
            expected = generated(request, self.window)
            if self.ended[request.name] == "aborted":
                assert tuple(self.tokens[request.name]) == expected[: len(self.tokens[request.name])]
                continue
            assert tuple(self.tokens[request.name]) == expected, request.name
            is_stopped = expected[-1] in request.stop_tokens
            assert self.ended[request.name] == ("stop" if is_stopped else "length")
        assert self.pool.num_held == 0
        self.pool.check()


def workload(num: int = 128, mean: int = 60, prompt: int = 32) -> list[Request]:
    """Requests with outputs of geometric length between 4 and 240 tokens, and prompts without common prefixes."""
    chance = random.Random(0)

    def length() -> int:
        n = 1
        while chance.random() > 1 / mean:
            n += 1
        return min(max(n, 4), 240)

    return [Request(str(i), tuple(chance.randrange(10**6) for _ in range(prompt)), length()) for i in range(num)]


@pytest.mark.contract
def test_continuous_batching_takes_at_most_half_the_steps_of_static_batching() -> None:
    requests = workload()
    options = Options(num_slots=16, max_length=512)
    served = Served(requests, options, num_pages=512, shares_prefixes=False)
    served.check(requests)
    lengths = [request.max_tokens for request in requests]
    static = sum(max(lengths[i : i + 16]) for i in range(0, len(lengths), 16))
    ideal = sum(lengths) / 16
    assert static >= 2.0 * served.steps, (static, served.steps)
    assert served.steps <= 1.4 * ideal, (served.steps, ideal)
    assert sum(served.used) / len(served.used) >= 0.85
    assert len({iteration.shape for iteration in served.iterations}) <= len(options.shapes) <= 6


def some_requests(chance: random.Random, num: int, overlap: float = 0.0) -> list[Request]:
    """Short and long requests.

    Args:
        overlap: the probability that a request extends, repeats or shortens another one.
    """
    stems = [tuple(chance.randrange(5) for _ in range(40)) for _ in range(2)]

    stops = [frozenset[int](), frozenset([6]), frozenset([0, 1])]
    made: list[Request] = []

    def prompt() -> tuple[int, ...]:
        if made and chance.random() < overlap:
            other = chance.choice(made)
            whole = other.prompt + generated(other)[: chance.choice([0, 0, 3, 40])]
            return whole[: chance.choice([len(whole), len(whole), chance.randint(1, len(whole))])][:70]
        own = tuple(chance.randrange(5) for _ in range(chance.randint(1, 30)))
        return chance.choice([(), stems[0], stems[1][: chance.randint(1, 40)]]) + own

    for i in range(num):
        made.append(Request(str(i), prompt(), chance.randint(1, 40), chance.choice(stops)))
    return made


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_slots=st.sampled_from([1, 3, 8]),
    num_pages=st.sampled_from([8, 11, 60]),
    ahead=st.sampled_from([0, 1, 2]),
    steps=st.sampled_from([1, 4]),
    num_proposals=st.sampled_from([0, 3]),
    shares_prefixes=st.booleans(),
    arrive=st.sampled_from([None, 1]),
    overlap=st.sampled_from([0.0, 0.8]),
    abort=st.sampled_from([0.0, 0.1]),
    has_policy=st.booleans(),
    window=st.sampled_from([None, 1, 16, 20, 50]),
)
def test_each_request_gets_the_tokens_of_the_model(
    seed: int,
    num_slots: int,
    num_pages: int,
    ahead: int,
    steps: int,
    num_proposals: int,
    shares_prefixes: bool,
    arrive: int | None,
    overlap: float,
    abort: float,
    has_policy: bool,
    window: int | None,
) -> None:
    """This holds under preemption, forks, speculation, aborts and dispatch ahead. With few pages most requests are
    recomputed."""
    requests = some_requests(random.Random(seed), 20, overlap)
    options = Options(num_slots, 120, ((2, 8), (1, 32)), steps, num_proposals)
    served = Served(
        requests,
        options,
        num_pages,
        ahead=ahead,
        proposer=NGram(shortest=1),
        policy=SpeculationPolicy(cost=1.2, patience=2) if has_policy else None,
        shares_prefixes=shares_prefixes,
        arrive=arrive,
        abort=abort,
        window=window,
    )
    served.check(requests)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 20, 50])
def test_a_hundred_thousand_tokens_in_windows(window: int | None) -> None:
    """Requests that extend, repeat and shorten each other, with few pages."""
    for seed in range(40):
        requests = some_requests(random.Random(seed), 150, 0.6)
        served = Served(requests, Options(8, 120, ((2, 8), (1, 32)), 4), 24, ahead=1, abort=0.05, window=window)
        served.check(requests)


@pytest.mark.contract
def test_pages_behind_the_window_are_given_back() -> None:
    """A sequence of 1,500 tokens in a window of 100 never holds more pages than the window and what is computed ahead; and one
    with the same beginning still finds the pages of its last window."""
    prompt = tuple(index % 5 for index in range(1400))
    requests = [Request("first", prompt, 100), Request("second", (*prompt[:1300], 6), 40)]
    options = Options(1, 1600, ((1, 64),), 4)
    served = Served(requests, options, 200, ahead=1, window=100, arrive=1)
    served.check(requests)
    assert served.most_held <= (100 + 3 * 64) // PAGE + 2 < 1500 // PAGE
    (started,) = [each for iteration in served.iterations for each in iteration.started if each.name == "second"]
    assert started.num_shared == 1300 // PAGE * PAGE
    needed = served.scheduler._admission.most_held(1600)
    assert needed == 20
    small = Served([requests[0]], options, needed, ahead=1, window=100)
    small.check(requests[:1])


def test_verification_may_follow_a_chunk_that_is_in_flight() -> None:
    """The prompt has one token more than its chunk. This token is verified with draft tokens before the chunk's results."""
    requests = [Request(str(i), (i, *range(32)), 9) for i in range(3)]
    options = Options(1, 120, ((1, 32),), 1, 3)
    served = Served(requests, options, 8, ahead=1, proposer=Guess(lambda tokens, num: [1] * num))
    served.check(requests)
    first, second = served.iterations[:2]
    assert not first.chunks[0].samples and second.shape.width > 1


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    requests = [Request("short", (1, 2), 60), Request("long", tuple(range(2048)), 4)]
    served = Served(requests, Options(2, 4096), 400, arrive=1)
    served.check(requests)
    chunks = [iteration for iteration in served.iterations if any(run.name == "long" for run in iteration.chunks)]
    assert len(chunks) == 2048 // 256
    assert all(iteration.decodes.names == ["short"] for iteration in chunks)


def test_a_short_prompt_behind_a_long_one_starts_within_four_iterations() -> None:
    """This holds with one row of chunks and with several, one iteration ahead."""
    for chunks in (((4, 64), (1, 256)), ((1, 256),), ((2, 128),)):
        options = Options(4, 16_400, chunks)
        scheduler, device = Scheduler(PagedCache(PagePool(1100), PAGE), options), Device(PAGE, 4)
        scheduler.submit(Request("long", tuple(range(16_000)), 4))
        first = scheduler.next()
        assert first is not None
        scheduler.submit(Request("short", tuple(range(7, 27)), 4))
        in_flight = deque([(first, device.run(first))])
        for _ in range(4):
            iteration = scheduler.next()
            assert iteration is not None
            in_flight.append((iteration, device.run(iteration)))
            if any(each.name == "short" for each in scheduler.update(*in_flight.popleft()).progress()):
                break
        else:
            pytest.fail(f"no token within four iterations of chunks {chunks}")


@example(remaining=[17, 34], shapes=[(5, 16)], shortest_first=False)
@example(remaining=[17, 18], shapes=[(3, 16)], shortest_first=False)
@given(
    remaining=st.lists(st.integers(1, 2000), min_size=1, max_size=9),
    shapes=st.lists(st.tuples(st.integers(1, 8), st.sampled_from([16, 64, 256])), min_size=1, max_size=3),
    shortest_first=st.booleans(),
)
def test_no_prompt_has_over_half_of_the_rows_while_another_needs_more(
    remaining: list[int], shapes: list[tuple[int, int]], shortest_first: bool
) -> None:
    found = divide_rows(remaining, shapes, shortest_first=shortest_first)
    assert (found.rows, found.length) in shapes
    given_rows = {number: -(-num // found.length) for number, num in found.num_tokens}
    assert 1 <= sum(given_rows.values()) <= found.rows
    for number, num in found.num_tokens:
        assert num in (given_rows[number] * found.length, remaining[number], remaining[number] - 1)
    is_waiting = any(remaining[n] > given_rows.get(n, 0) * found.length + 1 for n in range(len(remaining)))
    half = max(1, found.rows // 2)
    # A last token alone in a further row is left to a decode step.
    needed = [-(-num // found.length) - (num > found.length and num % found.length == 1) for num in remaining]
    for number, rows in given_rows.items():
        others = [given_rows.get(n, 0) >= min(half, needed[n]) for n in range(len(remaining)) if n != number]
        assert rows <= half or all(others), "more than half only of rows that are left over"
    assert sum(given_rows.values()) == found.rows or not is_waiting, "no row is idle while a prompt needs it"


def test_calls_of_several_steps_go_on_while_requests_wait() -> None:
    """A slot whose request ends in the call is idle until its end. That is allowed for a small share of the steps."""
    requests = workload(96, mean=120)
    options = Options(32, 512, ((8, 64),))
    served, single = (
        Served(requests, each, num_pages=1024, ahead=1, shares_prefixes=False)
        for each in (options, replace(options, steps=1))
    )
    served.check(requests)
    waiting = served.iterations[: len(served.iterations) // 2]
    several = sum(iteration.shape.steps > 1 for iteration in waiting if not iteration.chunks)
    assert several > sum(not iteration.chunks for iteration in waiting) / 4
    assert served.steps <= 1.1 * single.steps


def test_requests_of_a_lower_priority_number_start_first_and_are_preempted_last() -> None:
    requests = [Request(str(i), (i,), 40, priority=i % 2) for i in range(8)]
    served = Served(requests, Options(2, 64), 64)
    served.check(requests)
    assert [int(name) % 2 for name in served.ended] == [0, 0, 0, 0, 1, 1, 1, 1]
    both = [Request("low", (1,), 60, priority=1), Request("high", (2,), 60)]
    served = Served(both, Options(2, 64, steps=1), 5, arrive=1)
    served.check(both)
    attempts = {
        name: {run.attempt for each in served.runs for run in each if run.name == name} for name in ("low", "high")
    }
    assert len(attempts["low"]) > 1 == len(attempts["high"]), "the one that came first is preempted"


def test_prefixes_with_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "prefix_hashes", lambda keys, before=0: [number % 2 for number in range(len(keys))])
    requests = some_requests(random.Random(3), 30, 0.6)
    Served(requests, Options(6, 120, ((2, 16),)), 60, ahead=1).check(requests)


def chains(num: int, prompt: int, max_tokens: int) -> list[Request]:
    """Chains of thought: requests with one prompt."""
    return [Request(str(i), tuple(range(prompt)), max_tokens) for i in range(num)]


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("arrive", [None, 1])
def test_equal_prompts_are_prefilled_once_and_all_decode_in_the_next_iteration(ahead: int, arrive: int | None) -> None:
    requests = chains(8, 100, 60)
    served = Served(requests, Options(8, 256, steps=1), 100, ahead=ahead, arrive=arrive)
    served.check(requests)
    assert [run.num_tokens for iteration in served.iterations for run in iteration.chunks] == [100]
    assert [len(iteration.copies) for iteration in served.iterations[:3]] == (
        [0, 7, 0] if arrive is None else [0, 1, 1]
    )
    late = 0 if arrive is None else 6
    assert len(served.iterations) == 1 + 60 + late, "the others wait for the chunk only"


def test_a_prompt_whose_tokens_a_running_sequence_has_needs_no_prefill() -> None:
    """One prompt is another request's prompt and output so far; one is a part of it."""
    scheduler, device = Scheduler(PagedCache(PagePool(60), PAGE), Options(3, 256, steps=1)), Device(PAGE, 3)
    first = Request("first", tuple(range(20)), 60)
    scheduler.submit(first)
    ran: list[Run] = []
    while iteration := scheduler.next():
        ran += iteration.runs
        scheduler.update(iteration, device.run(iteration))
        if len(ran) == 30:
            scheduler.submit(Request("part", first.prompt[:10], 4))
            scheduler.submit(Request("more", first.prompt + generated(first)[:25], 4))
    assert {(run.name, run.start) for run in ran if run.num_tokens > 1} == {("first", 0)}
    assert min(run.start for run in ran if run.name == "part") == 10 - 1
    assert min(run.start for run in ran if run.name == "more") == 20 + 25 - 1


@pytest.mark.parametrize(("num", "prompt", "max_tokens"), [(8, 96, 40), (8, 100, 40), (5, 33, 100), (16, 16, 33)])
@pytest.mark.parametrize("ahead", [0, 2])
def test_chains_share_the_pages_of_their_prompt(num: int, prompt: int, max_tokens: int, ahead: int) -> None:
    """Each has its own copy of the page with the end of the prompt and the begin of the output."""
    requests = chains(num, prompt, max_tokens)
    whole, stored = prompt // PAGE, prompt + max_tokens - 1  # the last token is not stored
    needed = whole + num * (-(-stored // PAGE) - whole)
    served = Served(requests, Options(num, 256), needed, ahead=ahead)
    served.check(requests)
    assert served.most_held <= needed
    assert not any(run.attempt > num for runs in served.runs for run in runs), "none is preempted"


def test_a_request_that_waits_for_a_prefix_starts_when_its_source_is_aborted() -> None:
    scheduler, device = Scheduler(PagedCache(PagePool(60), PAGE), Options(4, 512)), Device(PAGE, 4)
    for request in chains(3, 400, 5):
        scheduler.submit(request)
    first = scheduler.next()
    assert first is not None and [run.name for run in first.runs] == ["0"]
    device.run(first)
    scheduler.abort("0")
    names = [run.name for _ in range(3) if (iteration := scheduler.next()) for run in iteration.runs]
    assert names == ["1", "1", "1", "2"]


def test_requests_are_served_in_order_of_arrival() -> None:
    requests = [Request(str(i), (i,), 10) for i in range(160)]
    served = Served(requests, Options(16, 64), 64)
    served.check(requests)
    batches = [int(name) // 16 for name in served.ended]
    assert batches == sorted(batches)


def test_an_aborted_or_failed_request_leaks_nothing_and_others_continue() -> None:
    scheduler, device = Scheduler(PagedCache(PagePool(40), PAGE), Options(4, 256, steps=1)), Device(PAGE, 4)
    requests = [Request(str(i), (i, *range(i * 7)), 30) for i in range(8)]
    for request in requests:
        scheduler.submit(request)
    ended: dict[str, str | None] = {}
    tokens: dict[str, list[int]] = {request.name: [] for request in requests}
    for step in range(400):
        iteration = scheduler.next()
        if iteration is None:
            break
        results = device.run(iteration, unsound=["2"] if step == 8 else [])
        if step == 5:
            assert scheduler.abort("1") and scheduler.abort("7") and not scheduler.abort("unknown")
        for each in scheduler.update(iteration, results).progress():
            tokens[each.name] += each.tokens
            ended |= {each.name: each.ended} if each.ended else {}
    assert ended.pop("2") == "unsound"
    assert ended == dict.fromkeys(("0", "3", "4", "5", "6"), "length")
    assert all(tuple(tokens[request.name]) == generated(request) for request in requests if request.name in ended)
    assert scheduler.cache.pool.num_held == scheduler.num_running == scheduler.num_waiting == 0


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (Request("a", (), 4), "has 0 prompt tokens and max_tokens=4: both must be positive"),
        (Request("a", (1,), 0), "has 1 prompt tokens and max_tokens=0: both must be positive"),
        (Request("a", (1,) * 60, 10), "has 60 prompt tokens and max_tokens=10, but a sequence has at most 64"),
        (Request("a", (1,) * 50, 10), "may need 4 pages of 16 tokens, but the cache has 3"),
        (Request("there", (1,), 1), "request 'there' is running already"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused(request_: Request, why: str) -> None:
    scheduler = Scheduler(PagedCache(PagePool(3), PAGE), Options(2, 64))
    scheduler.submit(Request("there", (1,), 1))
    with pytest.raises(InferenceError, match=why):
        scheduler.submit(request_)
    assert scheduler.num_waiting == 1


# -- speculative decoding and stop strings ----------------------------------------------------


def test_n_gram_proposes_the_continuation_of_the_longest_and_latest_match() -> None:
    sequences = [[1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [5, 1, 2, 3, 4, 7, 8, 3, 4, 6, 1, 2, 3, 4], [1, 2, 3], []]
    drafts = NGram().propose([DraftRequest(slot, tokens, 3) for slot, tokens in enumerate(sequences)])
    assert drafts == [[4, 9, 1], [7, 8, 3], [], []]


@pytest.mark.parametrize("ahead", [0, 2])
def test_correct_draft_tokens_save_iterations(ahead: int) -> None:
    """The proposer gets all sequences at once, with all of their tokens, so the scheduler waits for results in flight."""
    requests = [Request(str(i), (i, 2, 3), 201) for i in range(3)]
    texts = [[*request.prompt, *generated(request)] for request in requests]

    def guess(tokens: Sequence[int], num: int) -> Sequence[int]:
        text = texts[tokens[0]]
        assert list(tokens) == text[: len(tokens)] and 1 <= num <= 4
        return text[len(tokens) : len(tokens) + num]

    served = Served(requests, Options(3, 512, num_proposals=4), 64, ahead=ahead, proposer=Guess(guess))
    served.check(requests)
    assert len(served.iterations) <= 1 + 200 / 5 + 1


@pytest.mark.parametrize("ahead", [0, 2])
def test_wrong_draft_tokens_are_verified_rarely(ahead: int) -> None:
    requests = [Request(str(i), (i, 2, 3), 400) for i in range(3)]
    wrong = Guess(lambda tokens, num: [9] * num)
    options = Options(3, 512, num_proposals=4)
    served = Served(requests, options, 128, ahead=ahead, proposer=wrong, policy=SpeculationPolicy(cost=1.5, patience=4))
    served.check(requests)
    verified = sum(iteration.shape.width > 1 for iteration in served.iterations)
    assert 8 <= verified <= 40 and max(iteration.shape.steps for iteration in served.iterations) == 8


def test_speculation_is_disabled_while_it_does_not_pay_and_tried_again() -> None:
    policy = SpeculationPolicy(cost=1.5, patience=4)
    for _ in range(50):
        policy.record_verified(8 * 3, 8)
    assert policy.is_enabled and policy.tokens_per_step == pytest.approx(3.0)
    num_verified = 0
    for _ in range(1000):
        if policy.is_enabled:
            policy.record_verified(8, 8)
            num_verified += 1
        else:
            policy.record_plain()
    assert num_verified <= 60, "trials become rarer while they fail"
    while not policy.is_enabled:
        policy.record_plain()
    for _ in range(4):
        policy.record_verified(8 * 3, 8)
    assert policy.is_enabled, "speculation pays again"


@given(
    text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), data=st.data()
)
def test_text_ends_before_a_stop_string_however_it_is_split(text: str, stops: list[str], data: st.DataObject) -> None:
    stopper, shown = TextUntilStop(stops), ""
    rest = text
    while rest:
        num = data.draw(st.integers(1, len(rest)))
        shown += stopper.add(rest[:num])
        rest = rest[num:]
    shown += stopper.end()
    first = min((end for stop in stops if (end := _first_end(text, stop)) is not None), default=None)
    assert stopper.is_stopped == (first is not None)
    if first is None:
        assert shown == text
    else:
        assert text.startswith(shown) and any(text[len(shown) :].startswith(stop) for stop in stops)
        assert not any(stop in shown for stop in stops)


def _first_end(text: str, stop: str) -> int | None:
    at = text.find(stop)
    return None if at < 0 else at + len(stop)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InferenceError, match="a stop string is empty"):
        TextUntilStop([""])
