"""Load, unload and put to sleep the models of a server, and submit requests to their engines.

In: models' folders, requests. Out: `Models`, by name; `ServedModel`, which bounds the queue of its engine in tokens.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from autopar.errors import AutoparError, InferenceError
from autopar.inference import Engine, Generation
from autopar.serving.chat import ChatTemplate
from autopar.serving.choice_text import ChoiceText
from autopar.serving.engine_thread import EngineThread, Mailbox
from autopar.serving.fields import Generate
from autopar.serving.grammar import Grammars, JsonConstraint
from autopar.serving.limits import Limits, RequestError
from autopar.serving.metrics import ModelMetrics

#: (folder) -> engine; opened in a thread.
OpenEngine = Callable[[Path], Engine]


class Job(NamedTuple):
    """One choice.

    Args:
        num_new: the largest number of new tokens. number: among the choices of the prompt.
        details: further arguments of `Engine.submit`.
    """

    prompt: tuple[int, ...]
    num_new: int
    number: int
    details: Mapping[str, Any]


@dataclass(eq=False)
class Running:
    """The choices of one HTTP request that are being generated.

    Args:
        names: the names of the engine's requests. num_tokens: the tokens of each, prompt and output.
        prompts: the prompts, each with as many choices.
        waiting: the numbers of the choices in the queue.
        started_at: when the request came, by `time.monotonic`.
    """

    model: ServedModel
    prompts: list[tuple[int, ...]]
    names: list[str]
    num_tokens: list[int]
    box: Mailbox = field(default_factory=Mailbox)
    choices: list[ChoiceText] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    started_at: float = field(default_factory=time.monotonic)

    def started(self, choice: int) -> None:
        """A choice has left the queue."""
        if choice in self.waiting:
            self.waiting.remove(choice)
            self.model.queued_tokens -= self.num_tokens[choice]

    def abort(self, choice: int | None = None) -> None:
        """Abort one choice, or all."""
        for number in range(len(self.names)) if choice is None else [choice]:
            self.started(number)
            self.model.thread.abort(self.names[number])


class ServedModel:
    """A model with an engine in a thread of its own. For the event loop.

    Args:
        name: as requests name it. folder: where it was read from; None if it was made in memory.
        template: its chat template. limits: of the server.

    Attributes:
        state: "ready", "sleeping", "waking" or "failed". queued_tokens: tokens of requests that wait for a slot.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        limits: Limits,
        *,
        folder: Path | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        self.name, self.folder, self.template = name, folder, template
        self.created = int(time.time())
        self.state, self.failure = "ready", ""
        self.queued_tokens = 0
        self.metrics, self.grammars = ModelMetrics(name), Grammars(engine)
        self._limits = limits
        self.thread = EngineThread(engine, self._fail)

    @property
    def engine(self) -> Engine:
        return self.thread.engine

    @property
    def max_length(self) -> int:
        """The tokens of the longest sequence."""
        return self.engine.runner.served.options.max_length

    def tokens_of(self, prompt: str | Sequence[int], *, special: bool = True) -> tuple[int, ...]:
        """The tokens of a prompt.

        Raises:
            RequestError: it is not a prompt of this model.
        """
        try:
            return self.engine.tokens_of(prompt, special=special)
        except (InferenceError, TypeError, ValueError) as error:
            raise RequestError(400, str(error), "prompt") from None

    async def submit(
        self,
        prompts: list[tuple[int, ...]],
        wanted: Generate,
        name: str,
        details: Sequence[Mapping[str, Any]] = (),
    ) -> Running:
        """Submit the choices of the prompts of one HTTP request.

        Args:
            name: the request's, unique.
            details: further arguments of `Engine.submit`, for the first choice of each prompt; by default none.

        Raises:
            RequestError: the queue is full, or the request can never be served.
        """
        self.check_ready()
        jobs = [
            Job(prompt, self._num_new(len(prompt), wanted.max_tokens), number, {} if number else more)
            for prompt, more in zip(prompts, details or [{}] * len(prompts), strict=True)
            for number in range(wanted.n)
        ]
        num_tokens = [len(job.prompt) + job.num_new for job in jobs]
        self._check_queue(sum(num_tokens))
        names = [f"{name}-{number}" for number in range(len(jobs))]
        running = Running(self, prompts, names, num_tokens, waiting=set(range(len(jobs))))
        self.queued_tokens += sum(num_tokens)
        self.thread.boxes |= {each: (running.box, number) for number, each in enumerate(names)}
        try:
            constraints = await asyncio.to_thread(self._constraints, wanted, len(jobs))
            generations = await self.thread.call(lambda: self._submit(jobs, wanted, names, constraints))
        except BaseException as error:
            running.abort()
            if isinstance(error, AutoparError):
                raise RequestError(400, str(error)) from None
            raise
        tokenizer, needs_logprobs = self.engine.tokenizer, wanted.num_best is not None
        running.choices = [
            ChoiceText.of(each, tokenizer, wanted.stop, needs_logprobs=needs_logprobs) for each in generations
        ]
        return running

    def _num_new(self, num_prompt: int, max_tokens: int | None) -> int:
        """The largest number of tokens to generate after a prompt."""
        most = self.max_length - num_prompt
        num_new = most if max_tokens is None else max_tokens
        if num_prompt and 0 < num_new <= most:
            return num_new
        raise RequestError(
            400,
            f"the prompt has {num_prompt} tokens and {max(0, num_new)} more are to be generated, but this model is served with"
            f" at most {self.max_length} tokens, and a prompt has at least one: shorten the prompt, or reduce max_tokens",
            "max_tokens",
            "context_length_exceeded",
        )

    def _constraints(self, wanted: Generate, num: int) -> list[JsonConstraint | None]:
        """A constraint for each choice, if the text has a schema."""
        if wanted.schema is None:
            return [None] * num
        return [self.grammars.of_schema(wanted.schema, wanted.schema_field) for _ in range(num)]

    def _submit(self, jobs: list[Job], wanted: Generate, names: list[str], constraints: list[Any]) -> list[Generation]:
        """Submit the requests; in the engine's thread. Choices of one prompt share its pages."""
        generations: list[Generation] = []
        try:
            for name, job, constraint in zip(names, jobs, constraints, strict=True):
                sampling = replace(wanted.sampling, seed=(wanted.sampling.seed + job.number) % 2**32)
                options: dict[str, Any] = {"num_best": wanted.num_best or 0, "name": name, "priority": wanted.priority}
                options |= {"constraint": constraint, **job.details}
                generations.append(self.engine.submit(job.prompt, max_tokens=job.num_new, sampling=sampling, **options))
        except BaseException:
            for each in generations:
                each.abort()
            raise
        return generations

    def _check_queue(self, num_tokens: int) -> None:
        if not self.queued_tokens or self.queued_tokens + num_tokens <= self._limits.max_queued_tokens:
            return
        self.metrics.count_refused()
        rate = max(1.0, self.metrics.tokens_per_s())
        raise RequestError(
            429,
            f"{self.queued_tokens} tokens wait in the queue of {self.name!r}, which holds {self._limits.max_queued_tokens}: send the"
            " request again later",
            code="queue_full",
            retry_after_s=max(1, min(600, math.ceil(self.queued_tokens / rate))),
        )

    def check_ready(self) -> None:
        """Raise what a request to a model gets that serves none now."""
        if self.state in ("sleeping", "waking"):
            raise RequestError(
                503, f"the model {self.name!r} sleeps: wake it up", code="model_sleeping", retry_after_s=5
            )
        if self.state == "failed":
            raise RequestError(
                500, f"the engine of {self.name!r} has failed: {self.failure}. Load it again", code="failed"
            )

    def check_pooling(self) -> None:
        """Refuse embeddings of a model that was trained for other ones than the last token's state."""
        file = None if self.folder is None else self.folder / "1_Pooling" / "config.json"
        if file is None or not file.is_file():
            return
        try:
            modes = json.loads(file.read_text(encoding="utf-8"))
            used = [mode for mode, is_used in modes.items() if mode.startswith("pooling_mode_") and is_used is True]
        except (OSError, ValueError, AttributeError) as error:
            raise RequestError(400, f"{file.name} of the model's pooling cannot be read: {error}") from None
        if used != ["pooling_mode_lasttoken"]:
            raise RequestError(
                400,
                f"the model {self.name!r} has {', '.join(used) or 'no pooling'}: only pooling_mode_lasttoken is supported",
            )

    def _fail(self, error: BaseException) -> None:
        self.state, self.failure = "failed", f"{type(error).__name__}: {error}"

    async def sleep(self, weights: str = "host") -> None:
        """Free the devices' memory, as `Engine.sleep` does. Requests are aborted."""
        self.check_ready()
        engine, names, self.state = self.engine, list(self.thread.boxes), "sleeping"
        await self.thread.stop()

        def sleep() -> None:
            for name in names:
                engine.abort(name)
            engine.sleep("dropped" if weights == "dropped" else "host")

        await asyncio.to_thread(sleep)

    async def wake_up(self) -> None:
        """Load the weights again, and serve. The prefix cache is empty."""
        if self.state != "sleeping":
            return
        engine, self.state = self.engine, "waking"
        try:
            await asyncio.to_thread(engine.wake_up)
        except BaseException:
            self.state = "sleeping"
            raise
        self.thread = EngineThread(engine, self._fail)
        self.state = "ready"

    async def close(self) -> None:
        """End the engine's thread, and free its memory."""
        await self.thread.stop()
        await asyncio.to_thread(self.engine.close)


class Models:
    """The models of a server, by name.

    Args:
        open_engine: opens a model's folder.
        chat_template: a file that replaces the folders' templates.
    """

    def __init__(self, open_engine: OpenEngine, limits: Limits, chat_template: Path | None = None) -> None:
        self.by_name: dict[str, ServedModel] = {}
        self.limits = limits
        self._open, self._template = open_engine, chat_template
        self._lock = asyncio.Lock()

    def find(self, name: str) -> ServedModel:
        """A model by its name.

        Raises:
            RequestError: there is none.
        """
        if name not in self.by_name:
            names = ", ".join(map(repr, self.by_name)) or "none"
            raise RequestError(404, f"there is no model {name!r}; served are: {names}", "model", "model_not_found")
        return self.by_name[name]

    async def load(self, folder: Path, name: str | None = None) -> ServedModel:
        """Open a model's folder, and serve it under a name; by default the folder's.

        Raises:
            RequestError: the name is taken. AutoparError: the folder cannot be served.
        """
        name = name or folder.resolve().name
        async with self._lock:
            if name in self.by_name:
                raise RequestError(400, f"a model {name!r} is served already: unload it, or give another name", "name")
            template = ChatTemplate.read(folder, self._template)
            engine = await asyncio.to_thread(self._open, folder)
            return self.add(ServedModel(name, engine, self.limits, folder=folder, template=template))

    def add(self, model: ServedModel) -> ServedModel:
        """Serve a model."""
        self.by_name[model.name] = model
        return model

    async def unload(self, name: str) -> None:
        """Serve a model no more, and free its memory. Requests that run are aborted."""
        model = self.find(name)
        del self.by_name[name]
        await model.close()

    async def close(self) -> None:
        """Unload all models."""
        for name in list(self.by_name):
            await self.unload(name)
