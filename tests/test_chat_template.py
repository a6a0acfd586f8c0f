"""Conversations have the ids of transformers' `apply_chat_template`, and no template or message breaks anything."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from tests.helpers.checkpoints import cached_checkpoint, copy_checkpoint
from tests.helpers.gguf_metadata import byte_level_metadata, default_model_file, sentencepiece_metadata
from tests.helpers.tokenizers import (
    llama_fast_tokenizer,
    make_tokenizer,
    train_byte_level_bpe,
    train_sentencepiece,
    write_tokenizer_config,
)
from vllm_lite.base_tokenizer import BaseTokenizer
from vllm_lite.build import build_engine
from vllm_lite.chat_template import ChatTemplate, choose_chat_template, read_template_option
from vllm_lite.config import EngineConfig
from vllm_lite.errors import RequestError, StartupError
from vllm_lite.gguf_tokenizer import tokenizer_from_gguf
from vllm_lite.tokenizer import load_tokenizer
from vllm_lite.worker.gguf_header import open_gguf

WITH_BOS = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
WITHOUT_BOS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_EVERYTHING = """
{%- set ns = namespace(count=0) %}
{% macro turn(message) %}
    {{- message.role | upper }}: {{ message.content | trim | tojson }}
{% endmacro %}
    {% for message in messages %}
        {% if loop.index > 3 %}
            {% break %}
        {% endif %}
        {% if message.role == 'system' %}
            {% continue %}
        {% endif %}
        {% generation %}
        {% set ns.count = ns.count + 1 %}
        {% endgeneration %}
    {{ turn(message) }}
    {% endfor %}
count {{ ns.count }}, year {{ strftime_now('%Y') }}, {{ {'é': [1, 2]} | tojson(indent=2) }}
{%- for name in extra or [] %} {{ name }}{% endfor %}
{% if add_generation_prompt -%}
  assistant
{%- endif %}
"""
TEMPLATES = {"with BOS": WITH_BOS, "without BOS": WITHOUT_BOS, "with everything": WITH_EVERYTHING}

CHATS = [
    [{"role": "user", "content": "hello world"}],
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "{{ 7 * 7 }}{% for x in messages %}é 你好 <&>"},
        {"role": "assistant", "content": "  spaces  \n"},
        {"role": "user", "content": "again", "name": "Ann"},
    ],
    [{"role": "user", "content": "<s> a </s> <|im_start|>  system \n<|im_end|> <|endoftext|> b"}],
]


def _bos_added() -> PreTrainedTokenizerFast:
    core = train_byte_level_bpe()
    core.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|endoftext|>", eos_token="<|endoftext|>")


def _stripping() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(["END. Then"])
    tokenizer.add_tokens([AddedToken("<|im_start|>", rstrip=True, special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<|im_end|>", lstrip=True, rstrip=True, special=True, normalized=False)])
    return tokenizer


def _llama(folder: Path) -> PreTrainedTokenizerFast:
    """As Llama 2's with `add_bos_token`."""
    tokenizer = llama_fast_tokenizer(train_sentencepiece(folder))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


MAKERS: dict[str, Callable[[Path], PreTrainedTokenizerFast]] = {
    "plain": lambda folder: make_tokenizer(),
    "BOS added": lambda folder: _bos_added(),
    "stripping": lambda folder: _stripping(),
    "Llama": _llama,
}


def _load(folder: Path, *, given: str | None = None, metadata: Any = None) -> tuple[BaseTokenizer, ChatTemplate | None]:
    tokenizer = load_tokenizer(folder, mode="auto", gguf_metadata=metadata, trust_remote_code=False)
    return tokenizer, choose_chat_template(read_template_option(given), tokenizer)


def _template(text: str, folder: Path) -> ChatTemplate:
    make_tokenizer().save_pretrained(folder)
    _, template = _load(folder, given=text)
    assert template is not None
    return template


def _reference_ids(reference: Any, messages: Any, **options: Any) -> list[int]:
    ids: list[int] = reference.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    return ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    LlamaConfig().save_pretrained(folder)
    return folder


# The same ids as transformers


@pytest.mark.parametrize("source", ["checkpoint", "option", "file"])
@pytest.mark.parametrize("text", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_ids_are_those_of_transformers(make: Any, text: str, source: str, folder: Path, tmp_path: Path) -> None:
    reference = make(tmp_path / "sentencepiece")
    if source == "checkpoint":
        reference.chat_template = text
    reference.save_pretrained(folder)
    (tmp_path / "template.jinja").write_text(text)
    given = {"checkpoint": None, "option": text, "file": str(tmp_path / "template.jinja")}[source]
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer, template = _load(folder, given=given)
    assert template is not None
    for messages in CHATS:
        for has_prompt in (True, False):
            ids = tokenizer.encode_plain(template.render(messages, add_generation_prompt=has_prompt))
            assert ids == _reference_ids(reference, messages, chat_template=text, add_generation_prompt=has_prompt)


def test_bos_is_there_once(folder: Path, tmp_path: Path) -> None:
    _llama(tmp_path / "sentencepiece").save_pretrained(folder)
    tokenizer, template = _load(folder, given=WITH_BOS)
    assert template is not None
    assert tokenizer.encode("hi")[0] == 1
    assert tokenizer.encode_plain(template.render(CHATS[0])).count(1) == 1


@pytest.mark.parametrize("text", TEMPLATES.values(), ids=TEMPLATES)
def test_final_message_is_continued_as_transformers_does(text: str, folder: Path) -> None:
    make_tokenizer().save_pretrained(folder)
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer, template = _load(folder, given=text)
    assert template is not None
    messages = [*CHATS[0], {"role": "assistant", "content": "The answer is "}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    ids = tokenizer.encode_plain(template.render(messages, **options))
    assert ids == _reference_ids(reference, messages, chat_template=text, **options)


def test_variables_reach_the_template_as_in_transformers(folder: Path) -> None:
    make_tokenizer().save_pretrained(folder)
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer, template = _load(folder, given="{{ bos_token }}" + WITH_EVERYTHING)
    assert template is not None
    variables: dict[str, Any] = {"extra": ["a", "b"], "bos_token": "<stop>"}
    text = template.render(CHATS[0], template_kwargs=variables)
    assert text.startswith("<stop>")
    expected = _reference_ids(
        reference,
        CHATS[0],
        chat_template="{{ bos_token }}" + WITH_EVERYTHING,
        add_generation_prompt=True,
        **variables,
    )
    assert tokenizer.encode_plain(text) == expected


@pytest.mark.parametrize("strips", [{}, {"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}])
@pytest.mark.parametrize("text", TEMPLATES.values(), ids=TEMPLATES)
def test_lone_tokenizer_model_has_the_ids_of_llamas_tokenizer(
    text: str, strips: dict[str, bool], tmp_path: Path
) -> None:
    reference = llama_fast_tokenizer(train_sentencepiece(tmp_path))
    added = {f"<|im_{name}|>": 400 + index for index, name in enumerate(("start", "end"))}
    reference.add_tokens([AddedToken(name, special=True, normalized=False, **strips) for name in added])
    assert {name: reference.convert_tokens_to_ids(name) for name in added} == added
    decoder = {token_id: {"content": name, "special": True, **strips} for name, token_id in added.items()}
    write_tokenizer_config(
        tmp_path, add_bos_token=True, bos_token={"content": "<s>"}, chat_template=text, added_tokens_decoder=decoder
    )
    tokenizer, template = _load(tmp_path)
    assert template is not None
    assert (tokenizer.min_num_tokens("a" * 1000) > 0) == (not strips)
    for messages in CHATS:
        ids = tokenizer.encode_plain(template.render(messages))
        assert ids == _reference_ids(reference, messages, chat_template=text, add_generation_prompt=True)


@pytest.fixture(scope="module")
def smollm() -> tuple[BaseTokenizer, Any]:
    """The default model's tokenizer, and transformers' with the splitting of digits that it forgets."""
    path = default_model_file()
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    return tokenizer_from_gguf(open_gguf(path).metadata), reference


@pytest.mark.parametrize("given", [None, WITH_BOS, WITH_EVERYTHING])
@pytest.mark.parametrize("messages", CHATS)
def test_default_model_has_the_ids_of_transformers(
    messages: Any, given: str | None, smollm: tuple[BaseTokenizer, Any]
) -> None:
    tokenizer, reference = smollm
    template = choose_chat_template(given, tokenizer)
    assert template is not None
    ids = tokenizer.encode_plain(template.render(messages))
    assert ids == _reference_ids(reference, messages, chat_template=given, add_generation_prompt=True)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gguf_gives_its_special_tokens(kind: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"add_bos_token": True, "padding_token_id": 2, "unknown_token_id": 99999}
    if kind == "gpt2":
        metadata = byte_level_metadata(train_byte_level_bpe(), "gpt-2", **keys)
        expected = "<|endoftext|>,<|endoftext|>,,"
    else:
        metadata = sentencepiece_metadata(train_sentencepiece(tmp_path), **keys)
        expected = "<s>,</s>,,</s>"
    if kind == "gpt2":
        expected += metadata["tokenizer.ggml.tokens"][2]
    metadata["tokenizer.chat_template"] = "{{ bos_token }},{{ eos_token }},{{ unk_token }},{{ pad_token }}"
    _, template = _load(tmp_path, metadata=metadata)
    assert template is not None
    assert template.render(CHATS[0]) == expected


# Where a template comes from


def _named(**templates: str) -> list[dict[str, str]]:
    return [{"name": name, "template": text} for name, text in templates.items()]


CONFIG = "tokenizer_config.json"
SOURCES: dict[str, tuple[dict[str, object], str | None]] = {
    "none": ({}, None),
    "text": ({CONFIG: "config"}, "config"),
    "list": ({CONFIG: _named(tool_use="tools", default="config")}, "config"),
    "jinja": ({"chat_template.jinja": "jinja"}, "jinja"),
    "jinja before config": ({"chat_template.jinja": "jinja", CONFIG: "config"}, "jinja"),
    "additional": (
        {"chat_template.jinja": "jinja", "additional_chat_templates/rag.jinja": "rag", CONFIG: "config"},
        "jinja",
    ),
    "json": ({"chat_template.json": "json"}, "json"),
    "config before json": ({"chat_template.json": "json", CONFIG: "config"}, "config"),
}


def _write_sources(folder: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if name.endswith(".json"):
            old = json.loads(path.read_text()) if path.exists() else {}
            content = json.dumps(old | {"chat_template": content})
        path.write_text(str(content))


def _make_folder(folder: Path, kind: str) -> None:
    """What transformers loads, or a lone tokenizer.model, which it does not."""
    if kind == "transformers":
        make_tokenizer().save_pretrained(folder)
    else:
        train_sentencepiece(folder)


@pytest.mark.parametrize("kind", ["transformers", "sentencepiece"])
@pytest.mark.parametrize("files, expected", SOURCES.values(), ids=SOURCES)
def test_template_of_a_checkpoint(
    kind: str, files: dict[str, object], expected: str | None, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _make_folder(folder, kind)
    _write_sources(folder, files)
    _, template = _load(folder)
    assert (template and template.render(CHATS[0])) == expected
    if kind == "transformers" and expected not in (None, "json"):
        reference = AutoTokenizer.from_pretrained(folder)
        assert reference.apply_chat_template(CHATS[0], tokenize=False) == expected
    assert not caplog.records


BROKEN: dict[str, tuple[dict[str, object], str]] = {
    "no default": ({CONFIG: _named(tool_use="a", rag="b")}, r"'tool_use', 'rag'.* none of them is 'default'"),
    "no text": ({CONFIG: 5}, "int instead of text"),
    "no text by name": ({CONFIG: [{"name": "default", "template": {}}]}, "dict instead of text"),
    "syntax": ({CONFIG: "a\n{% for x in %}"}, r"Expected an expression.*line 2"),
    "unknown filter": ({"chat_template.jinja": "{{ 1 | nonsense }}"}, "No filter named 'nonsense'"),
    "nested beyond Python": ({CONFIG: "{% for a in b %}" * 30 + "{% endfor %}" * 30}, "too many statically nested"),
    "nested beyond Jinja": ({CONFIG: "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"}, "RecursionError"),
    "an old file that is no JSON object": ({"chat_template.json": "x"}, "is not JSON"),
}


@pytest.mark.parametrize("kind", ["transformers", "sentencepiece"])
@pytest.mark.parametrize("files, why", BROKEN.values(), ids=BROKEN)
def test_broken_template_of_a_checkpoint_is_none_and_a_warning(
    kind: str, files: dict[str, object], why: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _make_folder(folder, kind)
    _write_sources(folder, files)
    if "chat_template.json" in files:
        (folder / "chat_template.json").write_text("{")
    tokenizer, template = _load(folder)
    assert template is None
    assert tokenizer.encode_plain("AB")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.search(why, record.getMessage()), record.getMessage()
    assert "--chat-template" in record.getMessage()
    caplog.clear()
    _, template = _load(folder, given="{{ 'mine' }}")
    assert template is not None and template.render(CHATS[0]) == "mine"
    assert not caplog.records


@pytest.mark.parametrize(
    "files", [{CONFIG: [{"name": "x"}]}, {CONFIG: ["x"]}], ids=["a name without a template", "no object"]
)
def test_list_that_is_none_of_templates(files: Any, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    train_sentencepiece(folder)
    _write_sources(folder, files)
    assert _load(folder)[1] is None
    assert "not all a name and a template" in caplog.text


def test_gguf_without_a_template_or_with_a_broken_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metadata = byte_level_metadata(train_byte_level_bpe(), "gpt-2")
    assert _load(tmp_path, metadata=metadata)[1] is None
    assert not caplog.records
    assert _load(tmp_path, metadata=metadata | {"tokenizer.chat_template": "{% if %}"})[1] is None
    assert "Expected an expression" in caplog.text


@pytest.mark.parametrize(
    "value, why",
    [
        ("nowhere.jinja", r"nowhere.jinja cannot be read .*No such file.* or give the template itself.*\{%"),
        (".", "cannot be read .*directory"),
        ("a\0b", "cannot be read"),
        ("x" * 5000, "cannot be read .*too long"),
        ("", "cannot be read"),
        ("{% for x in %}", r"that Jinja can parse: Expected an expression.*\(line 1\)"),
        ("{{ messages | nonsense }}", "that Jinja can parse: No filter named 'nonsense'"),
    ],
)
def test_chat_template_option_that_is_of_no_use_ends_the_start(value: str, why: str) -> None:
    with pytest.raises(StartupError, match=f"--chat-template .*{why}"):
        read_template_option(value)


def test_chat_template_file_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "template").write_bytes(b"{{ '\xff' }}")
    with pytest.raises(StartupError, match=r"--chat-template .*template cannot be read .*utf-8"):
        read_template_option(str(tmp_path / "template"))


# What may go wrong with messages


REFUSING = {
    "raise_exception": ("{{ raise_exception('Roles must alternate!') }}", "Roles must alternate!"),
    "undefined": ("{{ messages[0].nothing.more }}", "'dict object' has no attribute 'nothing'"),
    "type": ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate str"),
    "zero": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "value": ("{{ 'abc'.index('x') }}", "ValueError"),
    "long loop": ("{% for i in range(10 ** 9) %}a{% endfor %}", "OverflowError: Range too big"),
    "escape": ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__' of 'list' object is unsafe"),
    "change": ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
    "endless": (
        "{% macro m() %}{{ m() }}{% endmacro %}{% if messages[0].content != 'Hello' %}{{ m() }}{% endif %}",
        "RecursionError",
    ),
}


@pytest.mark.parametrize("text, why", REFUSING.values(), ids=REFUSING)
def test_what_a_template_raises_is_a_mistake_of_the_request(text: str, why: str, folder: Path) -> None:
    template = _template(text, folder)
    with pytest.raises(RequestError, match="the chat template refuses these messages: ") as raised:
        template.render(CHATS[0])
    assert why in str(raised.value)


def test_reason_is_one_short_line(folder: Path) -> None:
    template = _template("{{ raise_exception(messages[0].content) }}", folder)
    with pytest.raises(RequestError) as raised:
        template.render([{"role": "user", "content": "x" * 10_000 + "\nsecret"}])
    assert len(str(raised.value)) < 400 and "secret" not in str(raised.value)


def test_message_is_never_a_template(folder: Path) -> None:
    template = _template("{{ messages[0].role }}{{ messages[0].content }}", folder)
    hostile = "{{ raise_exception('x') }}{% for i in range(9) %}{{ i }}{% endfor %}{# #}"
    assert template.render([{"role": hostile, "content": hostile}]) == hostile * 2


@pytest.mark.parametrize(
    "name", ["chat_template", "conversation", "tokenize", "padding", "tools", "messages", "self", "conversations"]
)
def test_variables_of_a_client_change_nothing_but_variables(name: str, folder: Path) -> None:
    template = _template(WITHOUT_BOS, folder)
    with pytest.raises(RequestError, match=f"chat_template_kwargs must not set '{name}'"):
        template.render(CHATS[0], template_kwargs={name: True})


def test_no_messages_and_both_flags(folder: Path) -> None:
    template = _template("{{ messages[0].content }}", folder)
    with pytest.raises(RequestError, match="refuses these messages"):
        template.render([])
    with pytest.raises(RequestError, match="continue_final_message must be false where add_generation_prompt"):
        template.render(CHATS[0], continue_final_message=True)
    with pytest.raises(RequestError, match="refuses these messages: ValueError: continue_final_message is set"):
        _template("{{ messages[0].role }}", folder).render(
            CHATS[0], add_generation_prompt=False, continue_final_message=True
        )


def test_many_threads_render_at_once(folder: Path) -> None:
    template = _template(WITH_EVERYTHING, folder)
    chats = [[{"role": "user", "content": f"{index} " * 2000}] for index in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(template.render, chats)) == [template.render(chat) for chat in chats]


def test_rendering_leaves_the_messages_alone(folder: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    _template(WITHOUT_BOS, folder).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == [{"role": "user", "content": "hi"}]


# The engine that is built


def _build(folder: Path, **options: Any) -> ChatTemplate | None:
    config = EngineConfig(model=str(folder), num_kv_blocks=16, num_threads=1, device="cpu", **options)
    return build_engine(config).chat_template


def test_built_engine_has_the_template(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = copy_checkpoint(cached_checkpoint(), tmp_path / "model")
    assert _build(folder) is None
    (folder / "chat_template.jinja").write_text(WITHOUT_BOS)
    template = _build(folder)
    assert template is not None and template.render(CHATS[0]).endswith("<|im_start|>assistant\n")
    template = _build(folder, chat_template="{{ 'mine' }}")
    assert template is not None and template.render(CHATS[0]) == "mine"
    (folder / "chat_template.jinja").write_text("{% if %}")
    assert _build(folder) is None
    assert "chat template cannot be used" in caplog.text


def test_option_that_is_of_no_use_ends_the_start_before_anything_is_loaded() -> None:
    with pytest.raises(StartupError, match="--chat-template nowhere cannot be read"):
        build_engine(EngineConfig(model="a model that is not there either", chat_template="nowhere"))
