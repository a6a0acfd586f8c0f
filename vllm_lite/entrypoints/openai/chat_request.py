"""The body of `POST /v1/chat/completions`: bytes to a checked request and to a prompt. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_lite.chat_template import ChatTemplate
from vllm_lite.entrypoints.json_body import kind_of, parse_object, take_flag
from vllm_lite.entrypoints.openai.asked import (
    PARAMS,
    WITHOUT_EFFECT,
    Asked,
    as_client_names,
    check_stream,
    drop_without_effect,
    refuse,
    take_model,
    take_stream,
)
from vllm_lite.entrypoints.openai.chat_messages import NO_TOOLS, parse_messages
from vllm_lite.entrypoints.request_service import Prompt
from vllm_lite.errors import RequestError
from vllm_lite.sampling_params import SamplingParams

NO_AUDIO = "audio is not supported"
REFUSED = {
    "tools": NO_TOOLS,
    "tool_choice": NO_TOOLS,
    "functions": NO_TOOLS,
    "function_call": NO_TOOLS,
    "response_format": "answers are text without a format that is enforced",
    "modalities": NO_AUDIO,
    "audio": NO_AUDIO,
    "prediction": "predicted outputs are not supported",
    "reasoning_effort": "reasoning is a matter of the model and its template (chat_template_kwargs)",
    "verbosity": "it is a matter of the model",
    "web_search_options": "nothing is searched",
    "prompt_logprobs": "logprobs of prompts are not supported in chats",
}
HARMLESS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Values that ask for what is done anyway."""
FIELDS = (
    "model",
    "messages",
    "stream",
    "stream_options",
    "max_completion_tokens",
    "top_logprobs",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    *PARAMS,
    *WITHOUT_EFFECT,
)
NO_TEMPLATE = "this model has no chat template: start the server with --chat-template, or use /v1/completions."


@dataclass(frozen=True)
class Chat:
    """What a template makes a prompt of."""

    messages: Sequence[Mapping[str, str]]
    adds_generation_prompt: bool
    continues_final_message: bool
    variables: Mapping[str, Any] | None

    def rendered(self, template: ChatTemplate | None) -> Prompt:
        """The prompt. That may take seconds. Raises RequestError, also for what the template refuses."""
        if template is None:
            raise RequestError(NO_TEMPLATE, "messages")
        try:
            text = template.render(
                self.messages,
                add_generation_prompt=self.adds_generation_prompt,
                continue_final_message=self.continues_final_message,
                template_kwargs=self.variables,
            )
        except RequestError as error:
            raise RequestError(str(error), error.param or "messages") from error
        return Prompt(text, add_special_tokens=False)


@dataclass(frozen=True)
class ChatRequest(Asked):
    """What a client asked for. Its one prompt has to be rendered first."""

    chat: Chat


def parse_chat_request(body: bytes) -> ChatRequest:
    """Raises RequestError that names the field where there is one."""
    fields = parse_object(body)
    model, stream = take_model(fields), take_stream(fields)
    chat = _take_chat(fields)
    refuse(fields, REFUSED, HARMLESS)
    drop_without_effect(fields)
    names = {"prompt": "messages"}
    if fields.get("max_completion_tokens") is not None:
        fields["max_tokens"] = fields["max_completion_tokens"]
        names["max_tokens"] = "max_completion_tokens"
    fields.pop("max_completion_tokens", None)
    fields.setdefault("max_tokens", None)
    fields["logprobs"] = _take_logprobs(fields)
    if fields["logprobs"]:
        names["logprobs"] = "top_logprobs"
    try:
        params = SamplingParams.from_request(fields, FIELDS)
    except RequestError as error:
        raise as_client_names(error, names) from error
    if stream is not None:
        check_stream(params)
    return ChatRequest(model, (), params, stream, names, chat)


def _take_chat(fields: dict[str, Any]) -> Chat:
    if "messages" not in fields:
        raise RequestError(
            'messages is missing; it must be a list like [{"role": "user", "content": "Hello"}].', "messages"
        )
    adds_prompt = take_flag(fields, "add_generation_prompt", default=True)
    continues = take_flag(fields, "continue_final_message")
    variables = fields.pop("chat_template_kwargs", None)
    if not (variables is None or isinstance(variables, dict)):
        raise RequestError(f"chat_template_kwargs must be an object, got {kind_of(variables)}.", "chat_template_kwargs")
    if adds_prompt and continues:
        raise RequestError(
            "continue_final_message must come with add_generation_prompt false: the next message has not begun.",
            "continue_final_message",
        )
    try:
        messages = parse_messages(fields.pop("messages"))
    except RequestError as error:
        raise RequestError(str(error), "messages") from error
    return Chat(messages, adds_prompt, continues, variables)


def _take_logprobs(fields: dict[str, Any]) -> int | None:
    """How many of the best tokens are wanted beside each; None for no logprobs at all."""
    is_wanted, num_top = take_flag(fields, "logprobs"), fields.pop("top_logprobs", None)
    if num_top is None:
        return 0 if is_wanted else None
    if not isinstance(num_top, int) or isinstance(num_top, bool) or num_top < 0:
        raise RequestError(f"top_logprobs must be an integer of at least 0, got {num_top!r:.80}.", "top_logprobs")
    if not is_wanted and num_top:
        raise RequestError('top_logprobs must come with "logprobs": true.', "top_logprobs")
    return num_top if is_wanted else None
