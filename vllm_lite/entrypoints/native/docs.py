"""What `GET /docs` shows of the native protocol: its snippets and its panel. Knows no HTML."""

from __future__ import annotations

from typing import Any

from vllm_lite.config import API_KEY_VARIABLE, ServerConfig
from vllm_lite.entrypoints.docs_page import PageDescription, Snippet
from vllm_lite.entrypoints.listening import server_url

CURL = """curl {origin}/generate \\
  <key>-d '{"prompt": "The capital of France is", "max_tokens": 32, "temperature": 0}'"""
WHOLE = """import requests

response = requests.post(
    "{origin}/generate",
    <key>json={"prompt": "The capital of France is", "max_tokens": 32, "temperature": 0},
    timeout=60,
)
response.raise_for_status()
print(response.json()["text"][0])"""
STREAMED = """import json
import requests

response = requests.post(
    "{origin}/generate",
    <key>json={"prompt": "Once upon a time", "max_tokens": 32, "stream": True},
    stream=True,
    timeout=60,
)
response.raise_for_status()
for message in response.iter_lines(delimiter=<delimiter>):
    if message:
        print(json.loads(message)["text"][0])"""
DELIMITERS = {"null": r'b"\0"', "newline": r'b"\n"'}


def native_description(document: dict[str, Any], model_name: str, config: ServerConfig) -> PageDescription:
    """Of a server with this OpenAPI document."""
    has_key = config.api_key is not None
    return PageDescription(
        document=document,
        model_name=model_name,
        origin=server_url(config.host, config.port, is_tls=config.ssl_certfile is not None),
        needs_key=has_key,
        snippets=_snippets(has_key, DELIMITERS[config.stream_delimiter]),
        panel="native",
        panel_data={"delimiter": config.stream_delimiter},
    )


def _snippets(has_key: bool, delimiter: str) -> list[Snippet]:
    """The key comes from the environment, so that a snippet runs as it was copied and shows no key to others."""
    curl_key = f'-H "Authorization: Bearer ${API_KEY_VARIABLE}" \\\n  ' if has_key else ""
    key = f'headers={{"Authorization": "Bearer " + os.environ["{API_KEY_VARIABLE}"]}},\n    ' if has_key else ""
    python = {"Python, the whole answer": WHOLE, "Python, a stream": STREAMED}
    codes = {title: code.replace("<key>", key).replace("<delimiter>", delimiter) for title, code in python.items()}
    if has_key:
        codes = {title: _with_os(code) for title, code in codes.items()}
    return [Snippet("curl", CURL.replace("<key>", curl_key)), *(Snippet(*item) for item in codes.items())]


def _with_os(code: str) -> str:
    return code.replace("import requests", "import os\nimport requests", 1)
