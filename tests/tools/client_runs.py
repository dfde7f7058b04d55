"""Runs of real clients of OpenAI's API. Each function runs one feature of a client.

    python -m tests.tools.client_runs CLIENT URL TOKENIZER

The command prints a JSON line for each run. `make clients` starts the server, and runs this command
for every client in the clients' environment. Each function imports the packages that it needs.
"""

import asyncio
import json
import os
import sys
import tempfile
import traceback
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

QUESTION = "What is the capital of France? Answer with one word."
MESSAGES = [{"role": "user", "content": QUESTION}]
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Target(NamedTuple):
    """A server: the address of its API, the name of its model, and a folder with the tokenizer."""

    url: str
    model: str
    tokenizer: str


def _make_person_class() -> Any:
    from pydantic import BaseModel

    class Person(BaseModel):
        """A person."""

        name: str
        age: int

    return Person


# -- openai ----------------------------------------------------------------------------------------


def _make_client(target: Target) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=target.url, api_key="-", max_retries=0, timeout=300)


def openai_chat(target: Target) -> None:
    completion = _make_client(target).chat.completions.create(
        model=target.model, messages=MESSAGES, max_completion_tokens=8, n=2, temperature=0.9,
        seed=3, logprobs=True, top_logprobs=2, presence_penalty=0.1, stop=["\n\n"], user="me",
        store=False, metadata={"a": "b"}, service_tier="auto",
    )  # fmt: skip
    assert [choice.index for choice in completion.choices] == [0, 1]
    for choice in completion.choices:
        assert choice.message.role == "assistant"
        assert choice.finish_reason in ("length", "stop")
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    usage = completion.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def openai_streamed_chat(target: Target) -> None:
    chunks = list(
        _make_client(target).chat.completions.create(
            model=target.model, messages=MESSAGES, max_tokens=8, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens <= 8
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    with _make_client(target).chat.completions.stream(
        model=target.model, messages=MESSAGES, max_tokens=8
    ) as stream:
        event_types = {event.type for event in stream}
        assert {"content.delta", "content.done"} <= event_types
        assert stream.get_final_completion().choices[0].message.content


def openai_completions(target: Target) -> None:
    client = _make_client(target)
    completion = client.completions.create(
        model=target.model, prompt=["One, two,", "Monday, Tuesday,"], max_tokens=4, n=2, echo=True,
        logprobs=2, temperature=0.5,
    )  # fmt: skip
    words = [choice.text.split(",")[0] for choice in completion.choices]
    assert words == ["One", "One", "Monday", "Monday"]
    logprobs = completion.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(logprobs.top_logprobs)
    chunks = client.completions.create(model=target.model, prompt=[5, 6], max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def openai_responses(target: Target) -> None:
    client = _make_client(target)
    request = {"model": target.model, "input": QUESTION, "max_output_tokens": 8}
    response = client.responses.create(**request, instructions="Be brief.")
    assert response.output_text
    assert response.usage.input_tokens_details.cached_tokens >= 0
    with client.responses.stream(**request) as stream:
        event_types = [event.type for event in stream]
    assert event_types[0] == "response.created"
    assert event_types[-1] in ("response.completed", "response.incomplete")


def openai_structured_output(target: Target) -> None:
    person_class = _make_person_class()
    client = _make_client(target)
    messages = [{"role": "user", "content": "Ann is 30 years old. Name and age as JSON?"}]
    completion = client.chat.completions.parse(
        model=target.model, messages=messages, response_format=person_class, max_tokens=60
    )
    assert isinstance(completion.choices[0].message.parsed, person_class)
    response = client.responses.parse(
        model=target.model, input=messages, text_format=person_class, max_output_tokens=60
    )
    assert isinstance(response.output_parsed, person_class)
    with client.chat.completions.stream(
        model=target.model, messages=messages, response_format=person_class, max_tokens=60
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, person_class)


def openai_tools(target: Target) -> None:
    client = _make_client(target)
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    options = {"model": target.model, "tools": [WEATHER_TOOL], "max_tokens": 60}
    tool_choice = {"type": "function", "function": {"name": "get_weather"}}
    client.chat.completions.create(**options, messages=messages, tool_choice=tool_choice)
    with client.chat.completions.stream(
        **options, messages=messages, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        completion = stream.get_final_completion()
    (call,) = completion.choices[0].message.tool_calls
    assert completion.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert "city" in json.loads(call.function.arguments)
    message = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages += [completion.choices[0].message.model_dump(exclude_none=True), message]
    final_completion = client.chat.completions.create(**options, messages=messages)
    assert final_completion.choices[0].message.content


# -- langchain-openai ------------------------------------------------------------------------------


def _make_model(target: Target, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    defaults = {"base_url": target.url, "api_key": "-", "model": target.model, "max_retries": 0}
    return ChatOpenAI(**{**defaults, "max_tokens": 60, "temperature": 0, **options})


def langchain_chat(target: Target) -> None:
    model = _make_model(target, max_tokens=8, seed=5, logprobs=True)
    message = model.invoke([("system", "Be brief."), ("human", QUESTION)])
    assert message.content
    assert message.usage_metadata["output_tokens"] <= 8
    assert message.response_metadata["logprobs"]["content"]
    assert len(model.batch([QUESTION, "Hello!"])) == 2
    assert asyncio.run(model.ainvoke(QUESTION)).content == model.invoke(QUESTION).content


def langchain_structured_output(target: Target) -> None:
    person_class = _make_person_class()
    question = "Ann is 30 years old. Answer with her name and age in JSON."
    for method in ("json_schema", "function_calling"):
        model = _make_model(target).with_structured_output(person_class, method=method)
        assert isinstance(model.invoke(question), person_class), method
        assert isinstance(list(model.stream(question))[-1], person_class), method
    model = _make_model(target).with_structured_output(
        person_class, method="json_schema", strict=True
    )
    assert isinstance(model.invoke(question), person_class)
    model = _make_model(target, max_tokens=120).with_structured_output(None, method="json_mode")
    assert isinstance(model.invoke(question), dict)


def langchain_tools(target: Target) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather of a city."""
        return f"sunny in {city}"

    messages: list[Any] = [HumanMessage("How is the weather in Paris?")]
    for tool_choice in ("any", "get_weather"):
        message = (
            _make_model(target)
            .bind_tools([get_weather], tool_choice=tool_choice, strict=True)
            .invoke(messages)
        )
        assert message.tool_calls[0]["name"] == "get_weather"
    for call in message.tool_calls:
        assert isinstance(get_weather.invoke(call), ToolMessage)
    messages += [message, *(get_weather.invoke(call) for call in message.tool_calls)]
    assert _make_model(target).bind_tools([get_weather]).invoke(messages).content


# -- lm-eval ---------------------------------------------------------------------------------------


def _evaluate(target: Target, model: str, task: dict[str, Any], **options: Any) -> Any:
    """Return the samples of a task with three questions, as lm-eval's model class scores them."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    rows = [
        {"question": "The capital of France is", "choices": ["Paris", "banana"], "answer": 0},
        {"question": "Two and two is", "choices": ["purple", "four"], "answer": 1},
        {"question": "The sun rises in the", "choices": ["east", "soup"], "answer": 0},
    ]
    path = "chat/completions" if "chat" in model else "completions"
    arguments = {"model": target.model, "base_url": f"{target.url}/{path}", **options}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        config = {
            "task": "facts", "dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": f"{folder}/rows.jsonl"}}, **task,
        }  # fmt: skip
        os.environ |= {"HF_HOME": folder, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "-"}
        return simple_evaluate(
            model=model, model_args=arguments, tasks=[config], task_manager=TaskManager(),
            apply_chat_template="chat" in model, bootstrap_iters=0, log_samples=True,
        )["samples"]["facts"]  # fmt: skip


_CHOICE_TASK = {
    "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "choices",
    "doc_to_target": "answer", "metric_list": [{"metric": "acc"}],
}  # fmt: skip
_GENERATION_TASK = {
    "output_type": "generate_until", "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {
        "until": [".", "\n", "\ndef", "#", "class"], "max_gen_toks": 8, "temperature": 0,
    },
    "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip


def lm_eval_loglikelihood(target: Target) -> None:
    for sends_tokens in (True, False):
        samples = _evaluate(
            target, "local-completions", _CHOICE_TASK, tokenizer=target.tokenizer,
            tokenizer_backend="huggingface", tokenized_requests=sends_tokens, batch_size=4,
        )  # fmt: skip
        assert [sample["acc"] for sample in samples] == [1, 1, 1]


def lm_eval_generate(target: Target) -> None:
    samples = _evaluate(
        target, "local-completions", _GENERATION_TASK, tokenizer=target.tokenizer, num_concurrent=3,
        tokenizer_backend="huggingface",
    )  # fmt: skip
    assert all(isinstance(sample["resps"][0][0], str) for sample in samples)


def lm_eval_chat(target: Target) -> None:
    samples = _evaluate(target, "local-chat-completions", _GENERATION_TASK, num_concurrent=3)
    assert all(sample["resps"][0][0] for sample in samples)


CLIENTS: dict[str, tuple[Callable[[Target], None], ...]] = {
    "openai": (
        openai_chat, openai_streamed_chat, openai_completions, openai_responses,
        openai_structured_output, openai_tools,
    ),
    "langchain-openai": (langchain_chat, langchain_structured_output, langchain_tools),
    "lm-eval": (lm_eval_loglikelihood, lm_eval_generate, lm_eval_chat),
}  # fmt: skip


def main(client: str, url: str, tokenizer: str) -> None:
    """Run a client's functions, and print a line for each."""
    with urllib.request.urlopen(f"{url}/models") as response:
        model = json.loads(response.read())["data"][0]["id"]
    for run in CLIENTS[client]:
        error = None
        try:
            run(Target(url, model, tokenizer))
        except Exception as exception:
            error = f"{type(exception).__name__}: {exception}"[:600]
            traceback.print_exc()
        result = {"run": run.__name__, "version": version(client), "error": error}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
