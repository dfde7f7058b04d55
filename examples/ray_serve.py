"""Run two replicas under Ray Serve (2.60). A conversation stays on the replica with its pages.

    python examples/ray_serve.py

It sends eight conversations with the header x-session-id, and eight without.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI
from ray import serve
from ray.serve.config import RequestRouterConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig

from hf_fp8kv import application, demo_model_path, serving

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
FACT = "Fact {} of {} is kept in a separate page, number {}, and a page has many slots. "


def make_replicas(name: str) -> serve.Application:
    def build() -> object:  # in each replica
        model = serving.enable(AutoModelForCausalLM.from_pretrained(name))
        batching = ContinuousBatchingConfig(num_blocks=256, page_size=64, max_batch_tokens=256)
        return application(model, AutoTokenizer.from_pretrained(name), batching=batching)

    options = {"request_router_config": RequestRouterConfig(request_router_class=ROUTER)}
    return serve.deployment(serve.ingress(build)(), num_replicas=2, **options).bind()


def run_conversation(client: OpenAI, header: bool, number: int) -> tuple[int, int]:
    session = f"conversation {number}, header {header}"
    name, messages, cached, tokens = client.models.list().data[0].id, [], 0, 0
    facts = "".join(FACT.format(n, session, n * 7) for n in range(8))
    for question in (f"{facts}How many facts are there?", "Why?", "Is that so?", "And then?"):
        messages.append({"role": "user", "content": question})
        keywords = {"max_tokens": 8, "extra_headers": {"x-session-id": session} if header else {}}
        answer = client.chat.completions.create(model=name, messages=messages, **keywords)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        cached += answer.usage.prompt_tokens_details.cached_tokens
        tokens += answer.usage.prompt_tokens
    return cached, tokens


def main() -> None:
    serve.run(make_replicas(sys.argv[1] if len(sys.argv) > 1 else str(demo_model_path())))
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    for header in (False, True):
        start, pool = time.perf_counter(), ThreadPoolExecutor(4)
        counts = pool.map(run_conversation, [client] * 8, [header] * 8, range(8))
        cached, tokens = map(sum, zip(*counts, strict=True))
        print(f"header {header}: {cached / tokens:.0%} cached, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
