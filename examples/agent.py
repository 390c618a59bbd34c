"""Let a model look things up: it calls a vector search and a web page tool by JSON tool calls, over HTTP.

    python examples/agent.py
    python examples/agent.py "How do I pause a job?" --url http://localhost:8000/v1 --model Qwen3-0.6B

The model is asked through an OpenAI-compatible server. Tool calls are JSON that the server's grammar enforces, so their arguments are
valid whatever the model. `search` embeds the query by the server's `/v1/embeddings`, and finds passages of autopar's documentation with a
vector index; `fetch` reads a page of a web server, here one of this machine that serves the documentation. Their results are messages of
the chat. After a few calls the model answers without tools. By default the script serves a small model with random weights: its calls are
valid, and what it says means nothing. With `--url`, it asks a model of yours.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import contextlib
import functools
import http.server
import json
import re
import subprocess
import sys
import tempfile
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from autopar import vector_search

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "How do I serve a model with JSON schemas?"
SYSTEM = "You answer questions about the library autopar. Search its documentation, fetch a page, then answer in one sentence."
PAGES = ("serving.md", "inference.md", "vector-search.md", "attention.md", "collectives.md")
_SHOWN, _BATCH = 160, 64


class Client:
    """An OpenAI-compatible server.

    Args:
        url: its address, up to `/v1`. model: the model's name; the server's only one by default.
    """

    def __init__(self, url: str, model: str | None) -> None:
        self._url, self._model = url.rstrip("/"), model

    def post(self, path: str, **body: Any) -> Any:
        """The reply to a request."""
        if self._model is not None:
            body["model"] = self._model
        headers = {
            "content-type": "application/json",
            "authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}",
        }
        request = urllib.request.Request(f"{self._url}/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)

    def embeddings(self, texts: list[str]) -> np.ndarray:
        """The vectors of texts, `[n, d]`."""
        batches = (texts[at : at + _BATCH] for at in range(0, len(texts), _BATCH))
        found = [each["embedding"] for batch in batches for each in self.post("embeddings", input=batch)["data"]]
        return np.array(found, np.float32)


# -- tools ---------------------------------------------------------------------------------------


def passages() -> list[str]:
    """The paragraphs of a few pages of the documentation."""
    found: list[str] = []
    for name in PAGES:
        text = re.sub(r"```.*?```", "", (ROOT / "docs" / name).read_text(encoding="utf-8"), flags=re.S)
        found += [f"{name}: {each.strip()[:400]}" for each in text.split("\n\n") if len(each) > 80]
    return found


def search_tool(client: Client) -> Callable[[str], str]:
    """A function from a query to the passages nearest to it."""
    texts = passages()
    index = vector_search.build(client.embeddings(texts), metric="cosine", index="exact")
    return lambda query: "\n".join(texts[at] for at in index.search(client.embeddings([query]), 2).ids[0])


def fetch_tool(site: str) -> Callable[[str], str]:
    """A function from an address to the text there. Only one site is read: a model must not choose where requests go."""

    def fetch(url: str) -> str:
        if urllib.parse.urlsplit(url)[:2] != urllib.parse.urlsplit(site)[:2]:
            return f"only pages of {site} can be read"
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                return reply.read(2000).decode(errors="replace")
        except OSError as error:
            return f"the page cannot be read: {error}"

    return fetch


def tool(name: str, about: str, argument: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A tool with one argument, as the API describes it."""
    parameters = {
        "type": "object",
        "properties": {argument: schema},
        "required": [argument],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


# -- the agent -----------------------------------------------------------------------------------


def answer(client: Client, question: str, site: str, *, num_calls: int, is_forced: bool, max_tokens: int) -> str:
    """Let the model call tools, and return its answer.

    Args:
        num_calls: the largest number of calls. is_forced: whether to require a call of each tool in turn, for a model that would call
            none by itself.
    """
    tools = [
        tool("search", "Search the documentation.", "query", {"type": "string", "minLength": 3, "maxLength": 60}),
        tool("fetch", "Read a page.", "url", {"enum": [f"{site}/{name}" for name in PAGES]}),
    ]
    functions: dict[str, Callable[[str], str]] = {"search": search_tool(client), "fetch": fetch_tool(site)}
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for number in range(num_calls):
        name = list(functions)[number % len(functions)]
        choice = {"type": "function", "function": {"name": name}} if is_forced else "auto"
        reply = client.post(
            "chat/completions", messages=messages, tools=tools, tool_choice=choice, max_tokens=max_tokens, seed=0
        )
        message = reply["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return message["content"] or ""
        for call in message["tool_calls"]:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            result = functions[name](*arguments.values())
            print(f"{name}({', '.join(map(repr, arguments.values()))})\n  {result[:_SHOWN]!r}")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result[:500]})
    reply = client.post("chat/completions", messages=messages, tools=tools, tool_choice="none", max_tokens=max_tokens)
    return reply["choices"][0]["message"]["content"]


# -- servers of this machine ---------------------------------------------------------------------


@contextlib.contextmanager
def documentation_site() -> Iterator[str]:
    """Serve the documentation on this machine, as the web that the tool reads."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(ROOT / "docs"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def write_small_model(folder: Path) -> None:
    """Write a model with random weights, a tokenizer of bytes, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from autopar.inference import write_checkpoint

    config = {
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config |= {"num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 4096, "eos_token_id": 256}
    write_checkpoint(folder, config)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer: Any = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (folder / "chat_template.jinja").write_text(template)


@contextlib.contextmanager
def small_model() -> Iterator[str]:
    """Serve a model with random weights, and end the server at the end."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_small_model(model)
        command = [sys.executable, "-m", "autopar", "serve", f"small={model}", "--port", "0", "--slots", "4"]
        with subprocess.Popen([*command, "--max-length", "4096"], stderr=subprocess.PIPE, text=True) as process:
            try:
                lines: list[str] = []
                for line in process.stderr or ():
                    lines.append(line)
                    if found := re.search(r"http://\S+/v1", line):
                        yield found[0]
                        break
                else:
                    raise SystemExit("".join(lines))
            finally:
                process.terminate()


def main() -> None:
    """Ask."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--url", help="of a server, up to /v1 (default: one with a small model of random weights)")
    parser.add_argument("--model", help="name of the model (default: the server's only one)")
    parser.add_argument("--calls", type=int, default=3, help="largest number of tool calls (default: 3)")
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(documentation_site())
        url = asked.url or stack.enter_context(small_model())
        # A model with random weights would never begin a call by itself, and would not end a sentence.
        is_forced, max_tokens = (False, 512) if asked.url else (True, 160)
        client = Client(url, asked.model)
        text = answer(client, asked.question, site, num_calls=asked.calls, is_forced=is_forced, max_tokens=max_tokens)
        print(f"answer: {text[:400]!r}")


if __name__ == "__main__":
    main()
