"""What `GET /docs` shows of OpenAI's protocol: its snippets and its panel. Knows no HTML."""

from __future__ import annotations

from typing import Any

from vllm_lite.config import API_KEY_VARIABLE, ServerConfig
from vllm_lite.entrypoints.docs_page import PageDescription, Snippet
from vllm_lite.entrypoints.listening import server_url

CURL = """curl {origin}/v1/chat/completions \\
  <key>-d '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32}'"""
CLIENT = """from openai import OpenAI

client = OpenAI(base_url="{origin}/v1", api_key=<key>)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is the capital of France?"}]
"""
WHOLE = """answer = client.chat.completions.create(model=model, messages=messages, max_tokens=32)
print(answer.choices[0].message.content)"""
STREAMED = """stream = client.chat.completions.create(model=model, messages=messages, max_tokens=32, stream=True)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)"""


def openai_description(document: dict[str, Any], model_name: str, config: ServerConfig) -> PageDescription:
    """Of a server with this OpenAPI document."""
    has_key = config.api_key is not None
    return PageDescription(
        document=document,
        model_name=model_name,
        origin=server_url(config.host, config.port, is_tls=config.ssl_certfile is not None),
        needs_key=has_key,
        snippets=_snippets(has_key),
        panel="openai",
        panel_data={"model": model_name},
    )


def _snippets(has_key: bool) -> list[Snippet]:
    """The key comes from the environment, so that a snippet runs as it was copied and shows no key to others."""
    curl_key = f'-H "Authorization: Bearer ${API_KEY_VARIABLE}" \\\n  ' if has_key else ""
    client = CLIENT.replace("<key>", f'os.environ["{API_KEY_VARIABLE}"]' if has_key else '"none"')
    client = f"import os\n\n{client}" if has_key else client
    return [
        Snippet("curl", CURL.replace("<key>", curl_key)),
        Snippet("Python, the whole answer", client + WHOLE),
        Snippet("Python, a stream", client + STREAMED),
    ]
