"""Start servers in separate processes, and measure them under the load of clients."""

import contextlib
import http.client
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise

from hf_fp8kv.errors import ConfigError

_START_SECONDS, _ANSWER_SECONDS = 600.0, 600.0
# Seconds from a streamed answer to a long prompt, and from the long prompt to other requests.
_DELAY_SECONDS = 1.0
_WORDS = [
    "page", "slot", "table", "length", "scale", "token", "layer", "head",
    "sea", "sun", "moon", "rain", "snow", "wind", "tree", "rose",
]  # fmt: skip


@dataclass(frozen=True)
class Load:
    """The requests of the clients, and the number of pages for them."""

    name: str
    clients: int  # number of simultaneous clients
    requests: int  # number of requests of all clients in a turn
    words: int  # number of words of a prompt, about one token each
    new_tokens: int  # maximum number of tokens of an answer
    blocks: int  # number of pages of the stock server, whose bytes all servers get
    long_words: int = 0  # number of words of a long prompt next to a streamed answer
    streamed: int = 300  # number of tokens of the streamed answer


@dataclass(frozen=True)
class Answer:
    """Times of an answer's first and last token, in seconds since its request."""

    first_time: float
    last_time: float
    tokens: int
    gap: float = 0.0  # longest time between two chunks

    @property
    def per_token(self) -> float:
        """The average time between two tokens, in seconds."""
        return (self.last_time - self.first_time) / max(self.tokens - 1, 1)


class Server:
    """A server in a separate process, and the measurements of its clients."""

    def __init__(self, process: "subprocess.Popen[str]", port: int, model: str) -> None:
        self.process, self.port, self.model = process, port, model
        # Answers of the measured turns, and new tokens per second of each turn.
        self.answers: list[Answer] = []
        self.throughputs: list[float] = []
        # Answers to long prompts, and the answers that were streamed during them.
        self.long_prompts: list[Answer] = []
        self.streams: list[Answer] = []
        # Requests without an answer, and the peak of the process in bytes.
        self.num_failed, self.peak = 0, 0
        # Peak of pages in use, all pages, their bytes. None if the server has no such metrics.
        self.pages: list[float] | None = None

    def run_load(self, load: Load, *, is_measured: bool, seed: int) -> None:
        """Run the load once, and keep its answers if `is_measured`."""
        stop_event = threading.Event()
        watcher = threading.Thread(target=self._watch_usage, args=(stop_event,))
        watcher.start()
        start = time.perf_counter()
        first_number = 1000 * seed
        try:
            with ThreadPoolExecutor(2) as extra_pool, ThreadPoolExecutor(load.clients) as pool:
                extra_requests = []
                if load.long_words:
                    stream_load = replace(load, new_tokens=load.streamed)
                    long_load = replace(load, words=load.long_words, new_tokens=2)
                    extra_loads = stream_load, long_load
                    for number, extra in enumerate(extra_loads, first_number + load.requests):
                        extra_requests.append(extra_pool.submit(self._fetch_answer, extra, number))
                        time.sleep(_DELAY_SECONDS)
                numbers = range(first_number, first_number + load.requests)
                requests = [pool.submit(self._fetch_answer, load, number) for number in numbers]
                replies = [request.result() for request in requests]
                extra_replies = [request.result() for request in extra_requests]
        finally:
            seconds = time.perf_counter() - start
            stop_event.set()
            watcher.join()
        answers = [answer for answer in replies if answer is not None]
        if not answers:
            raise ConfigError(
                f"the server of {self.model} answers no request. Start it in a terminal to see why"
            )
        if is_measured:
            self.num_failed += len(replies) - len(answers)
            self.answers += answers
            self.throughputs.append(sum(answer.tokens for answer in answers) / seconds)
            self.num_failed += extra_replies.count(None)
            answer_lists = (self.streams, self.long_prompts)
            for reply, measured_answers in zip(extra_replies, answer_lists, strict=False):
                if reply is not None:
                    measured_answers.append(reply)

    def _fetch_answer(self, load: Load, number: int) -> Answer | None:
        """Send one request and read its streamed answer."""
        words = random.Random(number).choices(_WORDS, k=load.words)
        text = f"{number}: {' '.join(words)}. Tell me more."
        request_body = {
            "model": self.model,
            "stream": True,
            "temperature": 0,
            "max_tokens": load.new_tokens,
            "messages": [{"role": "user", "content": text}],
        }
        times: list[float] = []
        tokens = 0
        start = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_SECONDS)
        with contextlib.closing(connection):
            try:
                connection.request("POST", "/v1/chat/completions", json.dumps(request_body),
                                   {"content-type": "application/json"})  # fmt: skip
                for line in connection.getresponse():
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    choice = chunk["choices"][0]
                    # An answer may consist only of its end.
                    is_end = choice.get("finish_reason") is not None and not times
                    if choice["delta"].get("content") or is_end:
                        times.append(time.perf_counter() - start)
                    tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
            except (OSError, http.client.HTTPException, ValueError, LookupError):
                return None
        if not times or not tokens:
            return None
        gaps = [b - a for a, b in pairwise(times)]
        return Answer(times[0], times[-1], tokens, max(gaps, default=0.0))

    def _watch_usage(self, stop_event: threading.Event) -> None:
        """Record the peaks of memory and pages until the turn is over."""
        import psutil

        process = psutil.Process(self.process.pid)
        is_over = False
        while not is_over:
            is_over = stop_event.wait(0.2)
            with contextlib.suppress(psutil.Error):
                self.peak = max(self.peak, process.memory_info().rss)
            metrics = self._read_metrics()
            if "pages_used" in metrics:
                pages_used = max(metrics["pages_used"], self.pages[0] if self.pages else 0)
                self.pages = [pages_used, metrics["pages_total"], metrics["bytes_total"]]

    def _read_metrics(self) -> dict[str, float]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
            pairs = re.findall(r"^hf_fp8kv_(\w+) (\S+)$", text, re.MULTILINE)
            return {name: float(value) for name, value in pairs}
        return {}


@contextlib.contextmanager
def run_server(arguments: list[str], model: str) -> Iterator[Server]:
    """Run a server inside the context. Show its log if it does not start."""
    # Threads that spin while they wait slow down the clients, and the clients slow them down.
    environment = {"OMP_WAIT_POLICY": "passive", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **os.environ}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    lines: list[str] = []
    port: list[int] = []
    ready = threading.Event()

    def read_log() -> None:
        for line in process.stdout or ():
            if ready.is_set():
                continue
            lines.append(line)
            pattern = r"(?:serving .* at|running on) http://127\.0\.0\.1:(\d+)"
            if match := re.search(pattern, line):
                port.append(int(match[1]))
                ready.set()
        ready.set()

    reader = threading.Thread(target=read_log)
    reader.start()
    try:
        if not ready.wait(_START_SECONDS) or not port:
            raise ConfigError(
                f"expected a server, got none from: {' '.join(arguments)}\n{''.join(lines[-20:])}"
            )
        yield Server(process, port[0], model)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        if process.stdout is not None:
            process.stdout.close()
