"""The server of OpenAI's protocol: its application and what its start needs to know."""

from __future__ import annotations

from aiohttp import web

from vllm_lite.entrypoints.app import ApiProtocol, make_app
from vllm_lite.entrypoints.docs_page import docs_page
from vllm_lite.entrypoints.launch import ServerProgram
from vllm_lite.entrypoints.openai.docs import openai_description
from vllm_lite.entrypoints.openai.errors import openai_failure
from vllm_lite.entrypoints.openai.models import Models
from vllm_lite.entrypoints.openai.openapi import openai_document
from vllm_lite.entrypoints.openai.routes import Api
from vllm_lite.entrypoints.request_service import RequestService


def make_openai_app(service: RequestService) -> web.Application:
    """The application of the server."""
    models = Models(service.model_names, service.model.max_model_len)
    api = Api(service, models)
    routes = [
        web.get("/v1/models", models.list_all),
        web.get("/v1/models/{name:.+}", models.retrieve),
        web.post("/v1/completions", api.completions),
        web.post("/v1/chat/completions", api.chat_completions),
    ]
    document = openai_document(service.engine_config, service.config)
    page = docs_page(openai_description(document, service.model_names[0], service.config))
    return make_app(service, ApiProtocol(routes, openai_failure, document, page))


OPENAI = ServerProgram(
    module="vllm_lite.entrypoints.openai.api_server",
    description="Serves a language model over OpenAI's protocol: /v1/completions, /v1/chat/completions, /v1/models.",
    make_app=make_openai_app,
    example_path="/v1/completions",
    example={"prompt": "The capital of France is", "max_tokens": 32, "temperature": 0},
)
