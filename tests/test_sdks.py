"""The OpenAI and Anthropic SDKs, unmodified, against the proxy with a real engine behind it."""

from __future__ import annotations

import re
import socket

import pytest
from parts import Serving, eventually, free_port, llama_command, missing

try:
    import anthropic
    import openai
except ImportError:
    openai = anthropic = None


MESSAGES = [{"role": "user", "content": "say something"}]
FIXED = {"seed": 7, "temperature": 0, "cache_prompt": False}


@pytest.fixture(scope="module", autouse=True)
def sdks():
    if openai is None:
        missing("no SDKs: pip install -r tests/requirements.txt")


@pytest.fixture(scope="module")
def proxy(llama_server, models, tmp_path_factory):
    """A proxy that asks for a key, with one model that works and one whose GPU is held: this test itself listens on the
    bench port of that host."""
    with socket.create_server(("127.0.0.1", 0)) as bench:
        small = {"command": llama_command(llama_server, models["small"]), "port": free_port(), "models": ["small"]}
        held = {"command": llama_command(llama_server, models["small"]), "port": free_port(), "models": ["held"]}
        hosts = {"here": {"engines": {"small": small}}, "busy": {"bench_port": bench.getsockname()[1], "engines": {"held": held}}}
        serving = Serving({"proxy": {"api_keys": ["sesame"]}, "hosts": hosts}, tmp_path_factory.mktemp("sdks"))
        yield serving.start()
        serving.stop()


@pytest.fixture
def open_ai(proxy):
    with openai.OpenAI(base_url=proxy.url + "/v1", api_key="sesame") as client:
        yield client


@pytest.fixture
def claude(proxy):
    with anthropic.Anthropic(base_url=proxy.url, api_key="sesame") as client:
        yield client


def requests_for(proxy: Serving, model: str) -> int:
    """How many requests for that model the proxy has answered, whatever the answer; none of them is still being counted."""

    def quiet() -> str | None:
        text = proxy.ask("GET", "/metrics", headers={"Authorization": "Bearer sesame"}).body.decode()
        return None if re.search(rf'in_flight{{model="{model}"}} [1-9]', text) else text

    text = eventually(quiet, "all are counted")
    return sum(int(n) for n in re.findall(rf'llmguard_requests_total{{model="{model}",status="\d+"}} (\d+)', text))


# ----- OpenAI


def test_openai_chat(open_ai):
    done = open_ai.chat.completions.create(model="small", messages=MESSAGES, max_tokens=8, seed=7, temperature=0)
    assert done.choices[0].message.content
    assert (done.choices[0].finish_reason, done.usage.completion_tokens) == ("length", 8)


def test_openai_chat_streamed_says_the_same_as_the_whole_answer(open_ai):
    asked = {"model": "small", "messages": MESSAGES, "max_tokens": 8, "seed": 7, "temperature": 0}
    whole = open_ai.chat.completions.create(**asked).choices[0].message.content
    chunks = list(open_ai.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_openai_responses(open_ai):
    done = open_ai.responses.create(model="small", input="say something", max_output_tokens=8)
    assert done.output_text


def test_openai_responses_streamed(open_ai):
    kinds, text = [], ""
    for event in open_ai.responses.create(model="small", input="say something", max_output_tokens=8, stream=True):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert text


def test_openai_models_are_listed(open_ai):
    assert {model.id for model in open_ai.models.list()} == {"small", "held"}
    assert open_ai.models.retrieve("small").id == "small"


def test_openai_sees_a_held_gpu_once_and_does_not_retry(open_ai, proxy):
    before = requests_for(proxy, "held")
    with pytest.raises(openai.APIStatusError) as raised:
        open_ai.chat.completions.create(model="held", messages=MESSAGES)
    assert raised.value.status_code == 423
    assert raised.value.body["type"] == "gpu_busy"
    assert "GPU is busy" in raised.value.message
    assert requests_for(proxy, "held") == before + 1


def test_openai_sees_a_held_gpu_once_on_a_stream_too(open_ai, proxy):
    before = requests_for(proxy, "held")
    with pytest.raises(openai.APIStatusError) as raised:
        open_ai.chat.completions.create(model="held", messages=MESSAGES, stream=True)
    assert raised.value.status_code == 423
    assert requests_for(proxy, "held") == before + 1


def test_openai_raises_its_own_exceptions_for_an_unknown_model_and_a_wrong_key(open_ai, proxy):
    with pytest.raises(openai.NotFoundError, match="did you mean small"):
        open_ai.chat.completions.create(model="smal", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError):
        open_ai.chat.completions.create(model="small", messages="not a list")
    with openai.OpenAI(base_url=proxy.url + "/v1", api_key="wrong") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(model="small", messages=MESSAGES)


# ----- Anthropic


def test_anthropic_messages(claude):
    done = claude.messages.create(model="small", messages=MESSAGES, max_tokens=8)
    assert done.content[0].text
    assert (done.stop_reason, done.usage.output_tokens) == ("max_tokens", 8)


def test_anthropic_messages_streamed_say_the_same_as_the_whole_answer(claude):
    asked = {"model": "small", "messages": MESSAGES, "max_tokens": 8}
    whole = claude.messages.create(**asked, extra_body=FIXED)
    with claude.messages.stream(**asked, extra_body=FIXED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == "max_tokens"


def test_anthropic_counts_tokens(claude):
    assert claude.messages.count_tokens(model="small", messages=MESSAGES).input_tokens > 0


def test_anthropic_sees_a_held_gpu_once_and_does_not_retry(claude, proxy):
    before = requests_for(proxy, "held")
    with pytest.raises(anthropic.APIStatusError) as raised:
        claude.messages.create(model="held", messages=MESSAGES, max_tokens=8)
    assert raised.value.status_code == 423
    assert raised.value.body["type"] == "error"
    assert raised.value.body["error"]["type"] == "gpu_busy"
    assert requests_for(proxy, "held") == before + 1


def test_anthropic_raises_its_own_exceptions_for_an_unknown_model_and_a_wrong_key(claude, proxy):
    with pytest.raises(anthropic.NotFoundError, match="did you mean small"):
        claude.messages.create(model="smal", messages=MESSAGES, max_tokens=8)
    with anthropic.Anthropic(base_url=proxy.url, api_key="wrong") as stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model="small", messages=MESSAGES, max_tokens=8)
