"""Compare `hf-fp8kv serve` and `transformers serve` under the same load.

All servers run one model with continuous batching, and have the same number of bytes for pages, so
FP8 pages hold twice the tokens. A third server runs our kernels on pages in the model's dtype, to
show the effect of FP8 alone. Each client sends requests one after another and reads the streamed
answers. The servers alternate. The results are medians over turns, and percentiles over the
requests of all turns. All prompts begin differently, so no prefix is reused.
"""

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hf_fp8kv.bench.reporting import compute_quartiles
from hf_fp8kv.formats import AUTO, DEFAULT_DTYPE, parse_dtype
from hf_fp8kv.serving.engines.common import read_kv_sizes
from hf_fp8kv.utils.demo_model import demo_model_path
from hf_fp8kv.utils.environment import describe_run

from .serve_clients import Load, Server, run_server
from .shared import MODEL_OPTIONS, TURNS_OPTION, Result, main

STOCK, OURS, UNQUANTIZED = "transformers serve", "hf-fp8kv serve", "hf-fp8kv serve, auto"
SERVER_NAMES = (STOCK, OURS, UNQUANTIZED)
_PERCENTILES = (50, 90, 99)
LOADS = (
    Load("room for all", clients=4, requests=8, words=100, new_tokens=32, blocks=32),
    Load("room for half", clients=12, requests=12, words=100, new_tokens=32, blocks=18),
    Load("long prompts", clients=4, requests=4, words=900, new_tokens=64, blocks=112),
    Load("beside a long prompt", clients=1, requests=3, words=20, new_tokens=8, blocks=112,
         long_words=5000),
)  # fmt: skip


def measure_serving(
    *,
    model: str | None = None,
    device: str = "auto",
    loads: Sequence[Load] = LOADS,
    page_size: int = 64,
    turns: int = 3,
    dtype: str = DEFAULT_DTYPE,
    batch_tokens: int = 512,
    progress: Callable[[str], None],
) -> Result:
    """Measure each load on each server.

    Args:
        model: A folder or a Hub id. None means the demo model.
        device: Device of the servers.
        loads: The loads.
        page_size: Number of tokens of a page.
        turns: Number of measured turns of each load. One unmeasured turn comes first.
        dtype: Format of the FP8 pages.
        batch_tokens: Maximum number of tokens of a step. With a long prompt, each server uses its
            default.
        progress: Function that is called with the name of the next measurement.

    Returns:
        The entries of `describe_run`, `settings`, and `rows` with `load`, `measure`, `server`,
        `against`, `value`, `unit`, `low` and `high` (quartiles over turns), and `failed` (requests
        without an answer).

    Raises:
        ConfigError: A server does not start, or answers no request.
    """
    run = describe_run("serve")
    model_path = model or str(demo_model_path())
    rows: list[dict[str, Any]] = []
    for load in loads:
        our_command = ["-m", "hf_fp8kv_cli", "serve", model_path, "--metrics-interval", "0"]
        stock_pages = str(load.blocks)
        fp8_pages = str(count_equal_pages(model_path, load.blocks, page_size, dtype))
        commands = {
            STOCK: ["-m", "transformers.cli.transformers", "serve", model_path,
                    "--continuous-batching", "--attn-implementation", "sdpa",
                    "--cb-num-blocks", stock_pages],
            OURS: [*our_command, "--kv-cache-dtype", dtype, "--cb-num-blocks", fp8_pages],
            UNQUANTIZED: [*our_command, "--kv-cache-dtype", AUTO, "--cb-num-blocks", stock_pages],
        }  # fmt: skip
        options = ["--device", device, "--host", "127.0.0.1", "--port", "0", "--cb-block-size",
                  str(page_size)]  # fmt: skip
        if not load.long_words:
            options += ["--cb-max-batch-tokens", str(batch_tokens)]
        with contextlib.ExitStack() as stack:
            servers = {}
            for name, command in commands.items():
                progress(f"{load.name}: starting {name}")
                servers[name] = stack.enter_context(run_server([*command, *options], model_path))
            for turn in range(turns + 1):
                names = list(servers)
                random.Random(turn).shuffle(names)
                for name in names:
                    progress(f"{load.name}: turn {turn} of {turns}, {name}")
                    servers[name].run_load(load, is_measured=turn > 0, seed=turn)
            rows += summarize_load(load, servers)
            stock_mib = load.blocks * _count_page_bytes(model_path, page_size, AUTO) / 2**20
            rows.append(_make_row(load, "bytes of all pages", STOCK, [stock_mib], "MiB"))
    settings = {"model": model_path, "device": device, "page_size": page_size, "turns": turns,
                "dtype": dtype, "batch_tokens": batch_tokens,
                "loads": [vars(load) for load in loads]}  # fmt: skip
    return {**run, "settings": settings, "rows": rows}


def count_equal_pages(model_path: str, stock_pages: int, page_size: int, dtype: str) -> int:
    """Return the number of pages of `dtype` that fit the bytes of the stock server's pages."""
    stock_bytes = stock_pages * _count_page_bytes(model_path, page_size, AUTO)
    return stock_bytes // _count_page_bytes(model_path, page_size, dtype)


def _count_page_bytes(model_path: str, page_size: int, dtype: str) -> int:
    """Return the bytes of a page of all layers, with its dynamic scales."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path).get_text_config()
    num_heads, dim = read_kv_sizes(config)
    is_unquantized = parse_dtype(dtype, "dtype") == AUTO
    vector_bytes = dim * (4 if "32" in str(config.dtype) else 2) if is_unquantized else dim + 2
    return int(2 * config.num_hidden_layers * num_heads * page_size * vector_bytes)


def summarize_load(load: Load, servers: dict[str, Server]) -> list[dict[str, Any]]:
    """Return the rows of a load, for all servers."""
    rows = []
    for name, server in servers.items():
        row = _make_row(load, "throughput", name, server.throughputs, "tokens/s")
        rows.append({**row, "failed": server.num_failed})
        measures: list[tuple[str, list[float], str]] = []
        for measure, unit, values in (
            ("first token", "ms", [1e3 * answer.first_time for answer in server.answers]),
            ("next token", "ms", [1e3 * answer.seconds_per_token for answer in server.answers]),
            ("whole answer", "s", [answer.last_time for answer in server.answers]),
        ):
            percentiles = np.percentile(values, _PERCENTILES, method="inverted_cdf").tolist()
            for percent, value in zip(_PERCENTILES, percentiles, strict=True):
                measures.append((f"{measure}, p{percent}", [value], unit))
        if server.streamed_answers and server.long_prompt_answers:
            gaps = [answer.longest_gap for answer in server.streamed_answers]
            first_times = [answer.first_time for answer in server.long_prompt_answers]
            measures.append(("largest gap of a stream", gaps, "s"))
            measures.append(("first token of the long prompt", first_times, "s"))
        measures.append(("memory of the process", [server.peak_bytes / 2**20], "MiB"))
        if metrics := server.metrics:
            title = f"pages in use, of {metrics['pages_total']:.0f}"
            measures.append((title, [metrics["pages_used"]], "pages"))
            measures.append(("bytes of all pages", [metrics["bytes_total"] / 2**20], "MiB"))
        rows += [_make_row(load, measure, name, values, unit) for measure, values, unit in measures]
    for name in (OURS, UNQUANTIZED):
        throughputs = zip(servers[name].throughputs, servers[STOCK].throughputs, strict=True)
        ratios = [ours / stock for ours, stock in throughputs]
        rows.append({**_make_row(load, "throughput ratio", name, ratios, "×"), "against": STOCK})
    return rows


def _make_row(
    load: Load, measure: str, server: str, values: Sequence[float], unit: str
) -> dict[str, Any]:
    value, low, high = compute_quartiles(values)
    return {
        "load": load.name, "measure": measure, "server": server, "against": None,
        "value": value, "unit": unit, "low": low, "high": high, "failed": None,
    }  # fmt: skip


if __name__ == "__main__":
    main(__doc__, measure_serving, {**MODEL_OPTIONS, **TURNS_OPTION})
