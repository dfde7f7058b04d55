"""Runs of real clients of OpenAI's API. Each function runs one feature of a client.

    python -m tests.tools.client_runs CLIENT URL TOKENIZER

The command prints a JSON line for each run. The environment variable ONLY selects runs whose
name contains its value. `make clients` starts the server, and runs this command for every client in
the clients' environment. Each function imports the packages that it needs.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

QUESTION = "What is the capital of France? Answer with one word."
MESSAGES = [{"role": "user", "content": QUESTION}]
PERSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER_FUNCTION = {
    "name": "get_weather",
    "description": "Return the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
WEATHER_TOOL = {"type": "function", "function": WEATHER_FUNCTION}


class Target(NamedTuple):
    """A server: the address of its API, the name of its model, and a folder with the tokenizer."""

    url: str
    model: str
    tokenizer: str


Run = Callable[[Target], Any]
CLIENTS: dict[str, dict[str, Run]] = {}  # the runs of each client, by name
PACKAGE_NAMES = {"lm-eval": "lm_eval"}  # if the package has a different name than the client


def register(client: str) -> Callable[[Run], Run]:
    """Register a function as a run of a client. Its name after "__" becomes the run's name."""

    def add_run(run: Run) -> Run:
        name = run.__name__.removeprefix("_").partition("__")[2].replace("_", " ")
        CLIENTS.setdefault(client, {})[name] = run
        return run

    return add_run


# -- openai ----------------------------------------------------------------------------------------


def _make_client(target: Target) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=target.url, api_key="-", max_retries=0, timeout=300)


@register("openai")
def _openai__models(target: Target) -> None:
    client = _make_client(target)
    assert client.models.list().data[0].id == target.model
    assert client.models.retrieve(target.model).id == target.model


@register("openai")
def _openai__chat(target: Target) -> None:
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


@register("openai")
def _openai__streamed_chat(target: Target) -> None:
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


@register("openai")
def _openai__completions(target: Target) -> None:
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


@register("openai")
def _openai__responses(target: Target) -> None:
    client = _make_client(target)
    response = client.responses.create(
        model=target.model, input=QUESTION, instructions="Be brief.", max_output_tokens=8
    )
    assert response.output_text
    assert response.usage.input_tokens_details.cached_tokens >= 0
    with client.responses.stream(
        model=target.model, input=[{"role": "user", "content": QUESTION}], max_output_tokens=8
    ) as stream:
        event_types = [event.type for event in stream]
    assert event_types[0] == "response.created"
    assert event_types[-1] in ("response.completed", "response.incomplete")


@register("openai")
def _openai__structured_output(target: Target) -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    client = _make_client(target)
    messages = [{"role": "user", "content": "Ann is 30 years old. Name and age as JSON?"}]
    completion = client.chat.completions.parse(
        model=target.model, messages=messages, response_format=Person, max_tokens=60
    )
    assert isinstance(completion.choices[0].message.parsed, Person)
    response = client.responses.parse(
        model=target.model, input=messages, text_format=Person, max_output_tokens=60
    )
    assert isinstance(response.output_parsed, Person)
    with client.chat.completions.stream(
        model=target.model, messages=messages, response_format=Person, max_tokens=60
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


@register("openai")
def _openai__tools(target: Target) -> None:
    client = _make_client(target)
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    for is_streamed in (False, True):
        options = {
            "model": target.model, "messages": messages, "tools": [WEATHER_TOOL], "max_tokens": 60,
            "tool_choice": "required" if is_streamed else {
                "type": "function", "function": {"name": "get_weather"},
            },
        }  # fmt: skip
        if is_streamed:
            with client.chat.completions.stream(**options, parallel_tool_calls=False) as stream:
                completion = stream.get_final_completion()
        else:
            completion = client.chat.completions.create(**options)
        (call,) = completion.choices[0].message.tool_calls
        assert completion.choices[0].finish_reason == "tool_calls"
        assert call.function.name == "get_weather"
        assert "city" in json.loads(call.function.arguments)
    message = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages += [completion.choices[0].message.model_dump(exclude_none=True), message]
    final_completion = client.chat.completions.create(
        model=target.model, messages=messages, tools=[WEATHER_TOOL], max_tokens=16
    )
    assert final_completion.choices[0].message.content


@register("openai")
def _openai__tools_of_responses(target: Target) -> None:
    client = _make_client(target)
    tool = {"type": "function", **WEATHER_FUNCTION, "strict": True}
    input_items: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    options = {"model": target.model, "tools": [tool], "max_output_tokens": 60}
    response = client.responses.create(**options, input=input_items, tool_choice="required")
    calls = [item for item in response.output if item.type == "function_call"]
    assert calls[0].name == "get_weather"
    with client.responses.stream(
        **options, input=input_items, tool_choice={"type": "function", "name": "get_weather"}
    ) as stream:
        list(stream)
        last_response = stream.get_final_response()
    (call,) = [item for item in last_response.output if item.type == "function_call"]
    assert "city" in json.loads(call.arguments)
    input_items += [item.model_dump(exclude_none=True) for item in last_response.output]
    input_items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    assert client.responses.create(**options, input=input_items).output_text


# -- langchain-openai ------------------------------------------------------------------------------


def _make_model(target: Target, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    defaults = {"base_url": target.url, "api_key": "-", "model": target.model, "max_retries": 0}
    return ChatOpenAI(**{**defaults, "max_tokens": 60, "temperature": 0, **options})


@register("langchain-openai")
def _langchain__chat(target: Target) -> None:
    model = _make_model(target, max_tokens=8, seed=5, logprobs=True)
    message = model.invoke([("system", "Be brief."), ("human", QUESTION)])
    assert message.content
    assert message.usage_metadata["output_tokens"] <= 8
    assert message.response_metadata["logprobs"]["content"]
    assert len(model.batch([QUESTION, "Hello!"])) == 2
    assert asyncio.run(model.ainvoke(QUESTION)).content == model.invoke(QUESTION).content


@register("langchain-openai")
def _langchain__streamed_chat(target: Target) -> None:
    model = _make_model(target, max_tokens=8, stream_usage=True)
    chunks = list(model.stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == model.invoke(QUESTION).content
    usages = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert sum(usage["output_tokens"] for usage in usages) <= 8


@register("langchain-openai")
def _langchain__completions(target: Target) -> None:
    from langchain_openai import OpenAI

    model = OpenAI(
        base_url=target.url, api_key="-", model=target.model, max_tokens=6, temperature=0,
        max_retries=0,
    )  # fmt: skip
    text = model.invoke("One, two, three,")
    assert text == "".join(model.stream("One, two, three,"))
    completions = model.generate(["One, two,", "Monday, Tuesday,"])
    assert len(completions.generations) == 2
    two_answers = OpenAI(
        base_url=target.url, api_key="-", model=target.model, max_tokens=6, n=2, best_of=2,
        logprobs=1, max_retries=0,
    ).generate(["One, two,"])  # fmt: skip
    assert len(two_answers.generations[0]) == 2
    assert two_answers.generations[0][0].generation_info["logprobs"]["tokens"]


@register("langchain-openai")
def _langchain__structured_output(target: Target) -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        """A person."""

        name: str
        age: int

    question = "Ann is 30 years old. Answer with her name and age in JSON."
    for method in ("json_schema", "function_calling"):
        model = _make_model(target).with_structured_output(Person, method=method)
        assert isinstance(model.invoke(question), Person), method
        assert isinstance(list(model.stream(question))[-1], Person), method
    model = _make_model(target).with_structured_output(Person, method="json_schema", strict=True)
    assert isinstance(model.invoke(question), Person)
    model = _make_model(target, max_tokens=120).with_structured_output(None, method="json_mode")
    assert isinstance(model.invoke(question), dict)


@register("langchain-openai")
def _langchain__tools(target: Target) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Return the weather of a city."""
        return f"sunny in {city}"

    messages: list[Any] = [HumanMessage("How is the weather in Paris?")]
    for choice in ("any", "get_weather"):
        message = (
            _make_model(target)
            .bind_tools([get_weather], tool_choice=choice, strict=True)
            .invoke(messages)
        )
        assert message.tool_calls[0]["name"] == "get_weather"
    for call in message.tool_calls:
        assert isinstance(get_weather.invoke(call), ToolMessage)
    messages += [message, *(get_weather.invoke(call) for call in message.tool_calls)]
    assert _make_model(target).bind_tools([get_weather]).invoke(messages).content


@register("langchain-openai")
def _langchain__responses(target: Target) -> None:
    model = _make_model(target, max_tokens=16, use_responses_api=True)
    assert model.invoke(QUESTION).text
    assert "".join(chunk.text for chunk in model.stream(QUESTION))


# -- litellm ---------------------------------------------------------------------------------------


def _make_options(target: Target, provider: str = "openai") -> dict[str, Any]:
    name = f"{provider}/{target.model}"
    return {"model": name, "api_base": target.url, "api_key": "-", "timeout": 300}


@register("litellm")
def _litellm__chat(target: Target) -> None:
    import litellm

    for provider in ("openai", "hosted_vllm", "litellm_proxy"):
        completion = litellm.completion(
            **_make_options(target, provider), messages=MESSAGES, max_tokens=8, temperature=0
        )
        assert completion.choices[0].message.content
        chunks = litellm.completion(
            **_make_options(target, provider), messages=MESSAGES, max_tokens=8, temperature=0,
            stream=True, stream_options={"include_usage": True},
        )  # fmt: skip
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == completion.choices[0].message.content


@register("litellm")
def _litellm__completions(target: Target) -> None:
    import litellm

    options = _make_options(target, "text-completion-openai")
    options |= {"prompt": "One, two,", "max_tokens": 6}
    completion = litellm.text_completion(**options, temperature=0)
    chunks = litellm.text_completion(**options, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == completion.choices[0].text


@register("litellm")
def _litellm__structured_output(target: Target) -> None:
    import litellm
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    messages = [{"role": "user", "content": "Ann is 30 years old. Name and age as JSON?"}]
    for response_format in (Person, {"type": "json_object"}):
        options = {**_make_options(target), "messages": messages, "max_tokens": 400}
        completion = litellm.completion(**options, response_format=response_format, temperature=0)
        if completion.choices[0].finish_reason == "length":  # an object may have any length
            assert response_format is not Person
            continue
        content = json.loads(completion.choices[0].message.content)
        assert response_format is not Person or Person(**content)


@register("litellm")
def _litellm__tools(target: Target) -> None:
    import litellm

    messages: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    options = {**_make_options(target), "tools": [WEATHER_TOOL], "max_tokens": 60}
    completion = litellm.completion(**options, messages=messages, tool_choice="required")
    calls = completion.choices[0].message.tool_calls
    messages += [
        completion.choices[0].message.model_dump(),
        *(
            {"role": "tool", "tool_call_id": x.id, "name": x.function.name, "content": "sunny"}
            for x in calls
        ),
    ]
    assert calls[0].function.name == "get_weather"
    assert litellm.completion(**options, messages=messages).choices[0].message.content


@register("litellm")
def _litellm__responses(target: Target) -> None:
    import litellm

    response = litellm.responses(**_make_options(target), input=QUESTION, max_output_tokens=16)
    assert response.output[0].content[0].text
    options = {**_make_options(target), "input": QUESTION, "max_output_tokens": 8}
    *_, last_event = litellm.responses(**options, stream=True)
    assert last_event.type in ("response.completed", "response.incomplete")


# -- instructor ------------------------------------------------------------------------------------


def _make_person_class() -> Any:
    from pydantic import BaseModel

    class Person(BaseModel):
        """A person."""

        name: str = ""  # "json_object" allows any object
        age: int = 0

    return Person


def _make_instructor_run(mode: str, **options: Any) -> Run:
    def run(target: Target) -> None:
        import instructor

        person_class = _make_person_class()
        client = instructor.from_openai(_make_client(target), mode=instructor.Mode[mode])
        arguments = {"model": target.model, "max_retries": 0, "messages": [
            {"role": "user", "content": "Ann is 30 years old. Give her name and age."}
        ]}  # fmt: skip
        arguments |= {"max_output_tokens" if "RESPONSES" in mode else "max_tokens": 300}
        person = client.create(response_model=person_class, **arguments, **options)
        assert isinstance(person, person_class)

    return run


# MD_JSON does not constrain the output to JSON, so its request has this regular expression.
_FENCED_JSON = r'```json\n\{"name": "[A-Za-z ]{1,20}", "age": [0-9]{1,3}\}\n```'
CLIENTS["instructor"] = {
    f"mode {mode}": _make_instructor_run(mode)
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "JSON_O1", "FUNCTIONS",
                 "RESPONSES_TOOLS")
} | {
    "mode MD_JSON": _make_instructor_run(
        "MD_JSON", extra_body={"structured_outputs": {"regex": _FENCED_JSON}}
    )
}  # fmt: skip


@register("instructor")
def _instructor__mode_PARALLEL_TOOLS(target: Target) -> None:
    import instructor

    person_class = _make_person_class()
    client = instructor.from_openai(_make_client(target), mode=instructor.Mode.PARALLEL_TOOLS)
    people = client.create(
        response_model=Iterable[person_class], model=target.model, max_tokens=200, max_retries=0,
        messages=[{"role": "user", "content": "Ann is 30 and Bob is 40. Call the tool for both."}],
        extra_body={"tool_choice": "required", "parallel_tool_calls": False},
    )  # fmt: skip
    assert all(isinstance(person, person_class) for person in people)


@register("instructor")
def _instructor__streams(target: Target) -> None:
    import instructor

    person_class = _make_person_class()
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(_make_client(target), mode=mode)
        arguments = {"model": target.model, "max_tokens": 80, "max_retries": 0, "messages": [
            {"role": "user", "content": "Ann is 30 years old. Give her name and age."}
        ]}  # fmt: skip
        *_, last_person = client.create_partial(response_model=person_class, **arguments)
        assert last_person.age is not None


# -- openai-agents ---------------------------------------------------------------------------------

REQUESTED_CITIES: list[str] = []  # arguments of `get_weather`, in the order of its calls


def _make_agent(target: Target, api: str, **options: Any) -> Any:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @function_tool
    def get_weather(city: str) -> str:
        """Return the weather of a city."""
        REQUESTED_CITIES.append(city)
        return f"It is sunny in {city}."

    client = AsyncOpenAI(base_url=target.url, api_key="-", max_retries=0)
    model_class = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[api]
    settings = {"max_tokens": 60, "temperature": 0.0, **options.pop("settings", {})}
    return Agent(
        name="helper", instructions="Use the tools.", tools=options.pop("tools", [get_weather]),
        model=model_class(target.model, client), model_settings=ModelSettings(**settings),
        **options,
    )  # fmt: skip


@register("openai-agents")
def _agents__tools(target: Target) -> None:
    from agents import Runner

    for api in ("chat", "responses"):
        REQUESTED_CITIES.clear()
        agent = _make_agent(target, api, settings={"tool_choice": "required"})
        result = Runner.run_sync(agent, "How is the weather in Paris?", max_turns=4)
        assert REQUESTED_CITIES
        assert result.final_output, api


@register("openai-agents")
def _agents__streams(target: Target) -> None:
    from agents import Runner

    async def run(api: str) -> Any:
        agent = _make_agent(target, api, settings={"tool_choice": "required"})
        result = Runner.run_streamed(agent, "How is the weather in Paris?", max_turns=4)
        event_types = {event.type async for event in result.stream_events()}
        assert {"raw_response_event", "run_item_stream_event"} <= event_types
        return result.final_output

    for api in ("chat", "responses"):
        REQUESTED_CITIES.clear()
        assert asyncio.run(run(api)), api
        assert REQUESTED_CITIES


# -- llm -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _configure_llm(target: Target) -> Iterator[Callable[..., str]]:
    """Yield a function that runs the command `llm` with arguments, and returns its output."""
    api = {"model_name": target.model, "api_base": target.url, "supports_tools": True,
           "supports_schema": True}  # fmt: skip
    models = [{"model_id": "demo", **api}, {"model_id": "demo-text", **api, "completion": True}]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps(models))
        # No plugins are loaded, because the plugin of the demo model needs llama.cpp.
        variables = {"LLM_USER_PATH": folder, "OPENAI_API_KEY": "-", "LLM_LOAD_PLUGINS": ""}

        def run(*arguments: str) -> str:
            process = subprocess.run(
                [sys.executable, "-m", "llm", *arguments], env={**os.environ, **variables},
                capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            assert process.returncode == 0, process.stderr
            return process.stdout

        yield run


@register("llm")
def _llm__prompt(target: Target) -> None:
    with _configure_llm(target) as llm:
        arguments = ("-m", "demo", "-o", "temperature", "0", "-o", "max_tokens", "12")
        assert llm(*arguments, QUESTION) == llm(*arguments, "--no-stream", QUESTION)
        assert llm(*arguments, "-c", "Say it again.").strip()


@register("llm")
def _llm__schema(target: Target) -> None:
    with _configure_llm(target) as llm:
        arguments = ("-m", "demo", "-o", "max_tokens", "60", "--schema", json.dumps(PERSON_SCHEMA))
        for options in ((), ("--no-stream",)):
            person = json.loads(llm(*arguments, *options, "Ann is 30 years old."))
            assert person.keys() == {"name", "age"}


@register("llm")
def _llm__tools(target: Target) -> None:
    tool = 'def get_weather(city: str) -> str:\n    "Weather of a city."\n    return "sunny"\n'
    with _configure_llm(target) as llm:
        arguments = ("-m", "demo", "-o", "max_tokens", "24", "--functions", tool, "--td")
        for options in ((), ("--no-stream",)):
            assert llm(*arguments, *options, "How is the weather in Paris?")


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


@register("lm-eval")
def _lm_eval__loglikelihood(target: Target) -> None:
    for sends_tokens in (True, False):
        samples = _evaluate(
            target, "local-completions", _CHOICE_TASK, tokenizer=target.tokenizer,
            tokenizer_backend="huggingface", tokenized_requests=sends_tokens, batch_size=4,
        )  # fmt: skip
        assert [sample["acc"] for sample in samples] == [1, 1, 1]


@register("lm-eval")
def _lm_eval__rolling_loglikelihood(target: Target) -> None:
    task = {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }  # fmt: skip
    samples = _evaluate(
        target, "local-completions", task, tokenizer=target.tokenizer, max_length=128,
        tokenizer_backend="huggingface",
    )  # fmt: skip
    assert all(-200 < sample["filtered_resps"][0] < 0 for sample in samples)


@register("lm-eval")
def _lm_eval__generate(target: Target) -> None:
    samples = _evaluate(
        target, "local-completions", _GENERATION_TASK, tokenizer=target.tokenizer, num_concurrent=3,
        tokenizer_backend="huggingface",
    )  # fmt: skip
    assert all(isinstance(sample["resps"][0][0], str) for sample in samples)


@register("lm-eval")
def _lm_eval__chat(target: Target) -> None:
    samples = _evaluate(target, "local-chat-completions", _GENERATION_TASK, num_concurrent=3)
    assert all(sample["resps"][0][0] for sample in samples)


# -- guidellm --------------------------------------------------------------------------------------


def _run_guidellm(target: Target, path: str) -> dict[str, Any]:
    """Send six requests to a path of the server with guidellm, and return its metrics."""
    server = target.url.removesuffix("/v1")
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            [sys.executable, "-m", "guidellm", "run", "--disable-console",
             "--backend", f"kind=openai_http,target={server},request_format={path}",
             "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
             "--tokenizer", f"kind=huggingface_auto,model={target.tokenizer}",
             "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
             "--output", f"kind=json,path={folder}/benchmark.json"],
            env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr[-2000:]
        (benchmark,) = json.loads(Path(folder, "benchmark.json").read_text())["benchmarks"]
    return benchmark["metrics"]


@register("guidellm")
def _guidellm__chat(target: Target) -> None:
    totals = _run_guidellm(target, "/v1/chat/completions")["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0), totals


@register("guidellm")
def _guidellm__completions(target: Target) -> None:
    metrics = _run_guidellm(target, "/v1/completions")
    assert metrics["request_totals"]["successful"] == 6
    assert metrics["output_token_count"]["successful"]["mean"] == 8


def main(client: str, url: str, tokenizer: str) -> int:
    """Run a client's functions, print a line for each, and return the number of failures."""
    with urllib.request.urlopen(f"{url}/models") as response:
        model = json.loads(response.read())["data"][0]["id"]
    num_failed = 0
    print(json.dumps({"client": client, "version": version(PACKAGE_NAMES.get(client, client))}))
    name_filter = os.environ.get("ONLY", "")
    for name, run in CLIENTS[client].items():
        if name_filter not in name:
            continue
        error = None
        try:
            run(Target(url, model, tokenizer))
        except Exception as exception:
            num_failed += 1
            error = f"{type(exception).__name__}: {exception}"[:600]
            traceback.print_exc()
        print(json.dumps({"run": name, "error": error}), flush=True)
    return num_failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
