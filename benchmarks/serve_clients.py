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

# Maximum time until a server is ready, and between two chunks of an answer.
_MAX_START_SECONDS, _MAX_CHUNK_SECONDS = 600.0, 600.0
# Time from a streamed answer to a long prompt, and from the long prompt to other requests.
_DELAY_SECONDS = 1.0
_WORDS = [
    "page", "slot", "table", "length", "scale", "token", "layer", "head",
    "sea", "sun", "moon", "rain", "snow", "wind", "tree", "rose",
]  # fmt: skip


@dataclass(frozen=True)
class Load:
    """The requests of the clients, and the number of pages for them. Results contain its fields."""

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
    num_tokens: int
    longest_gap: float = 0.0  # longest time between two chunks, in seconds

    @property
    def seconds_per_token(self) -> float:
        """The average time between two tokens, in seconds."""
        return (self.last_time - self.first_time) / max(self.num_tokens - 1, 1)


class Server:
    """A server in a separate process, and the measurements of its clients."""

    def __init__(self, process: "subprocess.Popen[str]", port: int, model: str) -> None:
        self.process, self.port, self.model = process, port, model
        # Answers of the measured turns, and new tokens per second of each turn.
        self.answers: list[Answer] = []
        self.throughputs: list[float] = []
        # Answers to long prompts, and the answers that were streamed during them.
        self.long_prompt_answers: list[Answer] = []
        self.streamed_answers: list[Answer] = []
        self.num_failed = 0  # requests without an answer
        self.peak_bytes = 0  # of the process's memory
        # Metrics of the server, with the peak of pages in use. Empty if the server has no metrics.
        self.metrics: dict[str, float] = {}

    def run_load(self, load: Load, *, is_measured: bool, seed: int) -> None:
        """Run the load once, and keep its answers if `is_measured`."""
        stop_event = threading.Event()
        watcher = threading.Thread(target=self._watch_usage, args=(stop_event,))
        watcher.start()
        start = time.perf_counter()
        first_id = 1000 * seed
        try:
            with ThreadPoolExecutor(2) as extra_pool, ThreadPoolExecutor(load.clients) as pool:
                extra_requests = []
                if load.long_words:
                    stream_load = replace(load, new_tokens=load.streamed)
                    long_load = replace(load, words=load.long_words, new_tokens=2)
                    extra_loads = stream_load, long_load
                    for prompt_id, extra in enumerate(extra_loads, first_id + load.requests):
                        request = extra_pool.submit(self._fetch_answer, extra, prompt_id)
                        extra_requests.append(request)
                        time.sleep(_DELAY_SECONDS)
                prompt_ids = range(first_id, first_id + load.requests)
                requests = [pool.submit(self._fetch_answer, load, index) for index in prompt_ids]
                outcomes = [request.result() for request in requests]
                extra_outcomes = [request.result() for request in extra_requests]
        finally:
            seconds = time.perf_counter() - start
            stop_event.set()
            watcher.join()
        answers = [outcome for outcome in outcomes if outcome is not None]
        if not answers:
            raise ConfigError(
                f"expected an answer from the server of {self.model}, got none to any request. "
                "Start the server in a terminal to see its errors."
            )
        if is_measured:
            self.num_failed += [*outcomes, *extra_outcomes].count(None)
            self.answers += answers
            self.throughputs.append(sum(answer.num_tokens for answer in answers) / seconds)
            answer_lists = (self.streamed_answers, self.long_prompt_answers)
            for outcome, measured_answers in zip(extra_outcomes, answer_lists, strict=False):
                if outcome is not None:
                    measured_answers.append(outcome)

    def _fetch_answer(self, load: Load, prompt_id: int) -> Answer | None:
        """Send one request and read its streamed answer. Return None if the request fails."""
        words = random.Random(prompt_id).choices(_WORDS, k=load.words)
        text = f"{prompt_id}: {' '.join(words)}. Tell me more."
        request_body = {
            "model": self.model, "stream": True, "temperature": 0, "max_tokens": load.new_tokens,
            "messages": [{"role": "user", "content": text}],
        }  # fmt: skip
        times: list[float] = []
        num_tokens = 0
        start = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_MAX_CHUNK_SECONDS)
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
                    usage = chunk.get("usage") or {}
                    num_tokens = usage.get("completion_tokens", num_tokens)
            except (OSError, http.client.HTTPException, ValueError, LookupError):
                return None
        if not times or not num_tokens:
            return None
        gaps = [end - start for start, end in pairwise(times)]
        return Answer(times[0], times[-1], num_tokens, max(gaps, default=0.0))

    def _watch_usage(self, stop_event: threading.Event) -> None:
        """Record the peaks of memory and pages until the turn is over."""
        import psutil

        process = psutil.Process(self.process.pid)
        is_over = False
        while not is_over:
            is_over = stop_event.wait(0.2)
            with contextlib.suppress(psutil.Error):
                self.peak_bytes = max(self.peak_bytes, process.memory_info().rss)
            metrics = self._read_metrics()
            if "pages_used" in metrics:
                peak = max(metrics["pages_used"], self.metrics.get("pages_used", 0))
                self.metrics = {**metrics, "pages_used": peak}

    def _read_metrics(self) -> dict[str, float]:
        """Return the metrics of an hf-fp8kv server by name. Other servers have none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
            metrics = re.findall(r"^hf_fp8kv_(\w+) (\S+)$", text, re.MULTILINE)
            return {name: float(value) for name, value in metrics}
        return {}


@contextlib.contextmanager
def run_server(arguments: list[str], model: str) -> Iterator[Server]:
    """Run a server inside the context.

    Raises:
        ConfigError: The server does not start. The message contains the end of its log.
    """
    # The server's threads would spin while they wait, and slow down the clients.
    environment = {"OMP_WAIT_POLICY": "passive", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **os.environ}
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment,
    )  # fmt: skip
    lines: list[str] = []
    ports: list[int] = []
    started_or_ended = threading.Event()

    def read_log() -> None:
        for line in process.stdout or ():
            if started_or_ended.is_set():
                continue  # a full pipe would block the server
            lines.append(line)
            pattern = r"(?:serving .* at|running on) http://127\.0\.0\.1:(\d+)"
            if match := re.search(pattern, line):
                ports.append(int(match[1]))
                started_or_ended.set()
        started_or_ended.set()

    reader = threading.Thread(target=read_log)
    reader.start()
    try:
        if not started_or_ended.wait(_MAX_START_SECONDS) or not ports:
            raise ConfigError(
                f"expected a server, got none from: {' '.join(arguments)}\n{''.join(lines[-20:])}"
            )
        yield Server(process, ports[0], model)
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
