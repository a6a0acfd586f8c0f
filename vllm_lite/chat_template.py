"""Turns a conversation into the text of a prompt, with the template of the checkpoint or of `--chat-template`.

transformers does the rendering, in Jinja's sandbox. Knows neither tokens nor HTTP.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from vllm_lite.base_tokenizer import BaseTokenizer
from vllm_lite.errors import RequestError, StartupError
from vllm_lite.tokenizer_files import TemplateText

logger = logging.getLogger(__name__)

Apply = Callable[..., str]
"""As the method `apply_chat_template` of transformers' tokenizers."""

TEMPLATE_MARKS = ("{{", "{%", "{#")
CANNOT_BE_COMPILED = (TemplateSyntaxError, SyntaxError, RecursionError)
"""SyntaxError is Python's own, of loops in loops beyond its limit of blocks."""
TAKEN = ("self", "conversations")
"""Names of arguments inside transformers, beside those of the function that is called."""
CANNOT_BE_RENDERED = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    SyntaxError,
    RecursionError,
)
"""What a template raises that is not made for the messages. A range beyond the sandbox's is an ArithmeticError."""
MAX_REASON_CHARS = 300
TRIAL = ({"role": "user", "content": "Hello"},)


class ChatTemplate:
    """A template and the special tokens that it may name. Any number of threads may render at once."""

    def __init__(self, text: str, apply: Apply, variables: Mapping[str, Any]) -> None:
        """`variables` are given to the template beside those that `apply` has by itself."""
        self._text, self._apply, self._variables = text, apply, dict(variables)
        self._taken = {"messages", *TAKEN, *inspect.signature(apply).parameters}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a prompt; `encode_plain` gives its ids, since templates write BOS themselves.

        They are the ids of transformers' `apply_chat_template`, which takes a special token that is written out in a
        message for that token, too. Nothing in `messages` is ever read as a template. `template_kwargs` are variables
        for the template and may come from a client. Raises RequestError where the template refuses the messages, for
        a variable that is not a template's, and for both flags together.
        """
        if add_generation_prompt and continue_final_message:
            raise RequestError("continue_final_message must be false where add_generation_prompt is true.")
        variables = template_kwargs or {}
        for name in variables:
            if name in self._taken:
                raise RequestError(
                    f"chat_template_kwargs must not set {name!r}, which is not the template's.", "chat_template_kwargs"
                )
        try:
            return self._apply(
                [dict(message) for message in messages],
                chat_template=self._text,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(self._variables | dict(variables)),
            )
        except CANNOT_BE_RENDERED as error:
            raise RequestError(f"the chat template refuses these messages: {_reason(error)}") from error

    def problem(self) -> str | None:
        """What is wrong with the template whatever the messages are; None where nothing is."""
        try:
            self.render(TRIAL)
        except RequestError as error:
            if isinstance(error.__cause__, CANNOT_BE_COMPILED):
                return _reason(error.__cause__)
        return None


def read_template_option(value: str | None) -> str | None:
    """The template that `--chat-template` names or is. Raises StartupError where it cannot be read or parsed."""
    if value is None:
        return None
    text = value if any(mark in value for mark in TEMPLATE_MARKS) else _read_template(value)
    if problem := ChatTemplate(text, _apply_without_tokenizer(), {}).problem():
        raise StartupError(f"--chat-template is not a template that Jinja can parse: {problem}.")
    return text


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null byte in the path
        raise StartupError(
            f"--chat-template {path} cannot be read ({error}): name a file with a template in UTF-8, or give the "
            f"template itself, which holds one of {' '.join(TEMPLATE_MARKS)}."
        ) from error


def choose_chat_template(given: str | None, tokenizer: BaseTokenizer) -> ChatTemplate | None:
    """The template that the user gave (`read_template_option`), else the checkpoint's, else None.

    A checkpoint's that is of no use is None and a warning: prompts without a chat need none.
    """
    own = tokenizer.chat_template if given is None else TemplateText(given)
    template, problem = None, own.problem
    if own.text is not None:
        apply = tokenizer.apply_chat_template or _apply_without_tokenizer()
        template = ChatTemplate(own.text, apply, tokenizer.special_tokens)
        problem = template.problem()
    if problem is None:
        return template
    logger.warning("the checkpoint's chat template cannot be used; --chat-template gives another one: %s", problem)
    return None


def _apply_without_tokenizer() -> Apply:
    # transformers takes its time to import: only where there is a template is it waited for.
    apply: Apply = importlib.import_module("vllm_lite.hf_tokenizer").apply_without_tokenizer()
    return apply


def _reason(error: BaseException) -> str:
    """One line of a text that may hold the whole conversation."""
    text = str(error).partition("\n")[0][:MAX_REASON_CHARS]
    where = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
    return text + where if isinstance(error, TemplateError) and text else f"{type(error).__name__}: {text}{where}"
