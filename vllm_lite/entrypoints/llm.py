"""`LLM`: the engine offline, for prompts that are all there. Knows no HTTP.

The engine is the server's. Every call, from whichever thread or event loop, has its prompts queued there in their
order, so that calls at the same time run as one batch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import Any

from tqdm import tqdm

from vllm_lite.build import build_parts
from vllm_lite.config import EngineConfig, config_from_keywords
from vllm_lite.engine.async_llm_engine import AsyncLLMEngine
from vllm_lite.engine.llm_engine import LLMEngine
from vllm_lite.engine.sequence import Request
from vllm_lite.engine.tokenizer_protocol import Tokenizer
from vllm_lite.entrypoints.engine_thread import EngineThread
from vllm_lite.entrypoints.offline_prompts import OfflinePrompt, check_prompts
from vllm_lite.errors import RequestError, RequestFailedError
from vllm_lite.outputs import OutputAccumulator, RequestDelta, RequestOutput
from vllm_lite.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

Call = Callable[[AsyncLLMEngine], Coroutine[Any, Any, list[RequestOutput]]]

BAR_INTERVAL_S = 0.1
SERVER_ONLY = ("max_log_len",)
"""Fields of `EngineConfig` that nothing but the server's log of requests reads."""


class LLM:
    """A model in this process.

    The keywords are the fields of `EngineConfig`: the engine's options of the command line, with underscores. Raises
    StartupError for an unknown one, naming the nearest known one, and where the model cannot be loaded. The model stays
    loaded until `close`, which the ends of a `with` block, of the object and of the process call.
    """

    def __init__(self, /, model: str | None = None, tokenizer: str | None = None, **options: Any) -> None:
        config = config_from_keywords(EngineConfig, {"model": model, "tokenizer": tokenizer, **options})
        if ignored := _fields_without_effect(config):
            logger.warning("accepted without effect: %s", ", ".join(ignored))
        parts = build_parts(config)
        self._engine = parts.engine
        self._tokenizer = parts.tokenizer
        self._request_ids = map(str, itertools.count())
        runner = AsyncLLMEngine(parts.engine, parts.executor, log_stats=not config.disable_log_stats)
        self._thread = EngineThread(runner)
        self._stop = weakref.finalize(self, self._thread.stop)

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One output for each prompt, in their order; any number of times, from any thread.

        `sampling_params` are one object for all prompts, a list with one for each, or None for `SamplingParams()`.
        `prompt_token_ids` has a list of ids for each prompt, whose text, if given, is then only shown in its output.
        The bar counts prompts that are done, and new tokens a second.

        Raises RequestError, a ValueError, before anything is computed if one of the prompts cannot be served, such as
        one that is too long or has no token (the empty one has none unless the tokenizer adds one, such as BOS).
        Raises RequestFailedError where the model failed at a prompt. Both name the prompt's index. After these, and
        after Ctrl-C, which aborts what runs, the object can be used as before. Raises EngineDeadError once it has been
        closed.
        """
        checked = check_prompts(prompts, sampling_params, prompt_token_ids)
        return self._thread.run(self._call(checked, use_tqdm))

    async def generate_async(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Like `generate`, but it does not hold up the caller's event loop. Cancelling it aborts what runs."""
        checked = check_prompts(prompts, sampling_params, prompt_token_ids)
        return await asyncio.wrap_future(self._thread.submit(self._call(checked, use_tqdm)))

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: `encode` gives the ids of a prompt, `decode` the text of ids."""
        return self._tokenizer

    def close(self) -> None:
        """Lets go of the model. Calls that are running raise EngineDeadError. Harmless when repeated."""
        self._stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, prompts: list[OfflinePrompt], use_tqdm: bool) -> Call:
        """What the engine's thread shall do. Does not hold this object, which ends when its user drops it."""
        return partial(_generate, control=self._engine, prompts=prompts, ids=self._request_ids, use_tqdm=use_tqdm)


async def _generate(
    engine: AsyncLLMEngine, *, control: LLMEngine, prompts: list[OfflinePrompt], ids: Iterator[str], use_tqdm: bool
) -> list[RequestOutput]:
    """A whole call, on the engine's loop: checks every prompt, then runs all of them. The first failure ends it."""
    requests = await asyncio.to_thread(lambda: [_prepare(control, next(ids), prompt) for prompt in prompts])
    with closing(_Progress(len(prompts), is_shown=use_tqdm and bool(prompts))) as progress:
        # Tasks begin in the order in which they are made, so unseeded requests draw the same seeds every time.
        tasks = [
            asyncio.create_task(_run(engine, request, prompt, progress)) for request, prompt in zip(requests, prompts)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)


def _prepare(control: LLMEngine, request_id: str, prompt: OfflinePrompt) -> Request:
    try:
        return control.prepare(request_id, prompt.text, prompt.token_ids, prompt.params)
    except RequestError as error:
        raise RequestError(f"{prompt.name}: {error}") from error


async def _run(engine: AsyncLLMEngine, request: Request, prompt: OfflinePrompt, progress: _Progress) -> RequestOutput:
    request_id, params = request.request_id, prompt.params
    output = OutputAccumulator(request_id, prompt.text, request.prompt_token_ids, num_outputs=params.n)
    try:
        generated = engine.generate(request_id, prompt.text, params, prepared=request, is_whole=not progress.is_shown)
        async with aclosing(generated) as deltas:
            async for delta in deltas:
                output.add(delta)
                progress.add(delta)
    except RequestFailedError as error:
        reason = "" if error.__cause__ is None else f" ({error.__cause__!r})"  # the engine keeps it from HTTP clients
        raise RequestFailedError(f"{prompt.name}: {error}{reason}") from error
    return output.output()


class _Progress:
    """A bar on stderr."""

    def __init__(self, num_prompts: int, *, is_shown: bool) -> None:
        self.is_shown = is_shown
        self._bar = tqdm(
            total=num_prompts,
            desc="Processed prompts",
            disable=not is_shown,
            mininterval=BAR_INTERVAL_S,
            miniters=0,  # tokens come long before a prompt is done
            dynamic_ncols=True,
        )
        self._num_tokens = 0
        self._start_s = time.monotonic()

    def add(self, delta: RequestDelta) -> None:
        """Takes note of what a step brought one of the prompts."""
        self._num_tokens += sum(len(output.token_ids) for output in delta.outputs)
        elapsed_s = time.monotonic() - self._start_s
        self._bar.set_postfix_str(f"{self._num_tokens / max(elapsed_s, 1e-9):.1f} tokens/s", refresh=False)
        self._bar.update(int(delta.finished))

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()


def _fields_without_effect(config: EngineConfig) -> list[str]:
    return config.fields_without_effect() + [name for name in SERVER_ONLY if getattr(config, name) is not None]
