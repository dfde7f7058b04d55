"""Runs of real clients of OpenAI's API. Each function runs one client.

    python -m tests.tools.client_runs CLIENT URL MODEL TOKENIZER

`make clients` starts the server, and runs this command for every client in the clients'
environment. Each function imports the packages that it needs.
"""

import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

QUESTION = "What is the capital of France? Answer with one word."
MESSAGES = [{"role": "user", "content": QUESTION}]
PERSON_MESSAGES = [{"role": "user", "content": "Ann is 30 years old. Name and age as JSON?"}]


class Person(BaseModel):
    name: str
    age: int


class Target(NamedTuple):
    """A server: the address of its API, the name of its model, and a folder with the tokenizer."""

    url: str
    model: str
    tokenizer: str


def run_openai(target: Target) -> None:
    from openai import OpenAI, pydantic_function_tool

    client = OpenAI(base_url=target.url, api_key="-", max_retries=0, timeout=300)
    chat = {"model": target.model, "messages": MESSAGES, "max_tokens": 8}
    completion = client.chat.completions.create(
        **chat, n=2, temperature=0.9, seed=3, logprobs=True, top_logprobs=2, presence_penalty=0.1,
        stop=["\n\n"], user="me", store=False, metadata={"a": "b"}, service_tier="auto",
    )  # fmt: skip
    assert [choice.index for choice in completion.choices] == [0, 1]
    for choice in completion.choices:
        assert choice.finish_reason in ("length", "stop")
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    usage = {"include_usage": True}
    *chunks, last_chunk = client.chat.completions.create(**chat, stream=True, stream_options=usage)
    assert last_chunk.usage.completion_tokens <= 8
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    completion = client.completions.create(
        model=target.model, prompt=["One, two,", "Monday, Tuesday,"], max_tokens=4, n=2, echo=True,
        logprobs=2, temperature=0.5,
    )  # fmt: skip
    words = [choice.text.split(",")[0] for choice in completion.choices]
    assert words == ["One", "One", "Monday", "Monday"]
    logprobs = completion.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(logprobs.top_logprobs)

    request = {"model": target.model, "input": QUESTION, "max_output_tokens": 8}
    assert client.responses.create(**request, instructions="Be brief.").output_text
    with client.responses.stream(**request) as stream:
        event_types = [event.type for event in stream]
    assert event_types[0] == "response.created"
    assert event_types[-1] in ("response.completed", "response.incomplete")
    response = client.responses.parse(
        model=target.model, input=PERSON_MESSAGES, text_format=Person, max_output_tokens=60
    )
    assert isinstance(response.output_parsed, Person)
    chat |= {"messages": PERSON_MESSAGES, "max_tokens": 60}
    with client.chat.completions.stream(**chat, response_format=Person) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)

    chat["tools"] = [pydantic_function_tool(Person)]
    with client.chat.completions.stream(
        **chat, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        completion = stream.get_final_completion()
    assert completion.choices[0].finish_reason == "tool_calls"
    message = completion.choices[0].message
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Person)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    chat["messages"] = [*PERSON_MESSAGES, message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(**chat).choices[0].message.content


def run_langchain_openai(target: Target) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather of a city."""
        return f"sunny in {city}"

    model = ChatOpenAI(
        base_url=target.url, api_key="-", model=target.model, max_retries=0, max_tokens=60,
        temperature=0, logprobs=True,
    )  # fmt: skip
    message = model.invoke([("system", "Be brief."), ("human", QUESTION)])
    assert message.content
    assert message.response_metadata["logprobs"]["content"]
    for options in ({"method": "json_schema", "strict": True}, {"method": "function_calling"}):
        structured_model = model.with_structured_output(Person, **options)
        assert isinstance(structured_model.invoke(PERSON_MESSAGES), Person), options
        assert isinstance(list(structured_model.stream(PERSON_MESSAGES))[-1], Person), options
    messages: list[Any] = [HumanMessage("How is the weather in Paris?")]
    for tool_choice in ("any", "get_weather"):
        tool_model = model.bind_tools([get_weather], tool_choice=tool_choice, strict=True)
        message = tool_model.invoke(messages)
        assert message.tool_calls[0]["name"] == "get_weather"
    messages += [message, *(get_weather.invoke(call) for call in message.tool_calls)]
    assert model.bind_tools([get_weather]).invoke(messages).content


ROWS = [
    {"question": "The capital of France is", "choices": ["Paris", "banana"], "answer": 0},
    {"question": "Two and two is", "choices": ["purple", "four"], "answer": 1},
    {"question": "The sun rises in the", "choices": ["east", "soup"], "answer": 0},
]
CHOICE_TASK = {
    "output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
}  # fmt: skip
GENERATION_TASK = {
    "output_type": "generate_until", "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {
        "until": [".", "\n", "\ndef", "#", "class"], "max_gen_toks": 8, "temperature": 0,
    },
    "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip


def run_lm_eval(target: Target) -> None:
    folder = tempfile.mkdtemp()
    os.environ |= {"HF_HOME": folder, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "-"}
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    Path(folder, "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    tokenizer = {"tokenizer": target.tokenizer, "tokenizer_backend": "huggingface"}
    runs = (
        ("local-completions", CHOICE_TASK, {**tokenizer, "batch_size": 4}),
        ("local-completions", CHOICE_TASK, {**tokenizer, "tokenized_requests": False}),
        ("local-completions", GENERATION_TASK, {**tokenizer, "num_concurrent": 3}),
        ("local-chat-completions", GENERATION_TASK, {"num_concurrent": 3}),
    )
    for name, task, options in runs:
        path = "chat/completions" if "chat" in name else "completions"
        config = {
            "task": "facts", "dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": f"{folder}/rows.jsonl"}},
            "doc_to_text": "{{question}}", **task,
        }  # fmt: skip
        samples = simple_evaluate(
            model=name, tasks=[config], task_manager=TaskManager(), bootstrap_iters=0,
            model_args={"model": target.model, "base_url": f"{target.url}/{path}", **options},
            apply_chat_template="chat" in name, log_samples=True,
        )["samples"]["facts"]  # fmt: skip
        if task is CHOICE_TASK:
            assert [sample["acc"] for sample in samples] == [1, 1, 1]
        assert all(sample["resps"][0][0] for sample in samples)


CLIENTS = {
    "openai": run_openai, "langchain-openai": run_langchain_openai, "lm-eval": run_lm_eval,
}  # fmt: skip


if __name__ == "__main__":
    client, *target_fields = sys.argv[1:]
    CLIENTS[client](Target(*target_fields))
    print(client, version(client), "works")
