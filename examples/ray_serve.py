"""Run two replicas with Ray Serve (2.60), and keep each conversation on the replica with its pages.

    python examples/ray_serve.py

The script runs eight conversations without the header x-session-id, then eight with the header.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI
from ray import serve
from ray.serve.config import RequestRouterConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig

from hf_fp8kv import demo_model_path, make_application, serving

ROUTER_CLASS = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
FACT = "Fact {} of {} is kept in a separate page, number {}, and a page has many slots. "


def make_replicas(name: str) -> serve.Application:
    def build_app() -> object:  # runs in each replica
        model = serving.enable(AutoModelForCausalLM.from_pretrained(name))
        batching = ContinuousBatchingConfig(num_blocks=256, page_size=64, max_batch_tokens=256)
        return make_application(model, AutoTokenizer.from_pretrained(name), batching=batching)

    options = {"request_router_config": RequestRouterConfig(request_router_class=ROUTER_CLASS)}
    return serve.deployment(serve.ingress(build_app)(), num_replicas=2, **options).bind()


def run_conversation(client: OpenAI, has_header: bool, number: int) -> tuple[int, int]:
    """Return the numbers of cached tokens and of all tokens in the prompts of a conversation."""
    session = f"conversation {number}, header {has_header}"
    name = client.models.list().data[0].id
    messages: list[dict[str, str]] = []
    num_cached = num_tokens = 0
    facts = "".join(FACT.format(n, session, n * 7) for n in range(8))
    for question in (f"{facts}How many facts are there?", "Why?", "Is that so?", "And then?"):
        messages.append({"role": "user", "content": question})
        headers = {"x-session-id": session} if has_header else {}
        options = {"max_tokens": 8, "extra_headers": headers}
        answer = client.chat.completions.create(model=name, messages=messages, **options)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        num_cached += answer.usage.prompt_tokens_details.cached_tokens
        num_tokens += answer.usage.prompt_tokens
    return num_cached, num_tokens


def main() -> None:
    serve.run(make_replicas(sys.argv[1] if len(sys.argv) > 1 else str(demo_model_path())))
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    for has_header in (False, True):
        start = time.perf_counter()
        with ThreadPoolExecutor(4) as pool:
            counts = list(pool.map(run_conversation, [client] * 8, [has_header] * 8, range(8)))
        seconds = time.perf_counter() - start
        num_cached = sum(cached for cached, _ in counts)
        num_tokens = sum(total for _, total in counts)
        title = f"{'with' if has_header else 'without'} x-session-id"
        print(f"{title}: {num_cached / num_tokens:.0%} of the tokens cached, {seconds:.1f} s")


if __name__ == "__main__":
    main()
