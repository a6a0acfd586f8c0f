"""The detokenizer over real tokenizers: what streams is what they decode, whatever the tokens are."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from tests.helpers.gguf_metadata import byte_level_metadata
from tests.helpers.timing import best_time
from tests.helpers.tokenizers import llama_fast_tokenizer, make_tokenizer, train_byte_level_bpe, train_sentencepiece
from vllm_lite.base_tokenizer import BaseTokenizer
from vllm_lite.engine.detokenizer import Detokenizer
from vllm_lite.gguf_tokenizer import tokenizer_from_gguf
from vllm_lite.hf_tokenizer import HuggingFaceTokenizer
from vllm_lite.sampling_params import SamplingParams
from vllm_lite.sentencepiece_tokenizer import load_sentencepiece

REPLACEMENT = "\ufffd"


@functools.cache
def _sentencepiece_file() -> Path:
    return train_sentencepiece(Path(tempfile.mkdtemp()))


TOKENIZERS: dict[str, Callable[[], BaseTokenizer]] = {
    "byte-level": lambda: tokenizer_from_gguf(byte_level_metadata(train_byte_level_bpe(), "gpt-2")),
    "byte-level of transformers": lambda: HuggingFaceTokenizer(make_tokenizer(["END. Then"])),
    "sentencepiece": lambda: load_sentencepiece(_sentencepiece_file()),
    "sentencepiece of transformers": lambda: HuggingFaceTokenizer(llama_fast_tokenizer(_sentencepiece_file())),
    "python": lambda: HuggingFaceTokenizer(ByT5Tokenizer()),
}
SHARED = {name: functools.cache(make) for name, make in TOKENIZERS.items()}
with_every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def _stream(
    tokenizer: BaseTokenizer, prompt_ids: Sequence[int], ids: Sequence[int], params: SamplingParams | None = None
) -> list[str]:
    """The new text of each id, and at the end what was held back."""
    detokenizer = Detokenizer(tokenizer, params or SamplingParams(), prompt_ids)
    return [*(detokenizer.append(token_id, check_stop=True).text for token_id in ids), detokenizer.finish()]


TEXTS = st.text(
    st.sampled_from("ab he\n 你好é😀<>.") | st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT),
    max_size=24,
)


@with_every_tokenizer
@given(pieces=st.lists(TEXTS, min_size=1, max_size=6), num_prompt=st.integers(0, 100))
def test_a_stream_adds_up_to_what_the_tokenizer_decodes(name: str, pieces: list[str], num_prompt: int) -> None:
    """The pieces are encoded one by one, which gives tokens that the whole text would not have."""
    tokenizer = SHARED[name]()
    ids = [token_id for piece in pieces for token_id in tokenizer.encode_plain(piece)]
    prompt_ids, ids = ids[:num_prompt], ids[num_prompt:]
    texts = _stream(tokenizer, prompt_ids, ids)
    # A prompt can end within a character, which then is the output's.
    prompt = tokenizer.decode(prompt_ids)
    prompt = prompt.rstrip(REPLACEMENT) if ids else prompt
    assert prompt + "".join(texts) == tokenizer.decode([*prompt_ids, *ids])
    assert not any(REPLACEMENT in text for text in texts)


@given(text=TEXTS)
def test_byte_fallback_decodes_as_transformers_does(text: str) -> None:
    tokenizer, reference = SHARED["sentencepiece of transformers"](), llama_fast_tokenizer(_sentencepiece_file())
    ids = tokenizer.encode(text)
    assert ids == reference(text).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids)


@with_every_tokenizer
@given(data=st.data())
def test_any_ids_stream_in_bounded_space(name: str, data: st.DataObject) -> None:
    """Bytes that make no character: nothing is taken back, lost or kept waiting for more than three tokens."""
    tokenizer = SHARED[name]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=60))
    params = SamplingParams(skip_special_tokens=data.draw(st.booleans()), spaces_between_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, params, [])
    for token_id in ids:
        detokenizer.append(token_id, check_stop=True)
        assert len(detokenizer._decoder._open) <= 3
        assert len(detokenizer._decoder._context) <= 16
    whole = tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens, spaces_between_special_tokens=False)
    assert "".join(_stream(tokenizer, [], ids, params)) == whole


@pytest.mark.parametrize("name", ["sentencepiece", "sentencepiece of transformers"])
def test_the_first_word_of_an_output_keeps_its_space(name: str) -> None:
    tokenizer = SHARED[name]()
    prompt_ids, ids = tokenizer.encode("hello"), tokenizer.encode_plain("hello world")[1:]
    assert tokenizer.decode(ids) == "world"
    assert "".join(_stream(tokenizer, prompt_ids, ids)) == " world"
    text = "hello 你好 😀 world"
    texts = _stream(tokenizer, tokenizer.encode("hello"), tokenizer.encode_plain(text)[1:])
    assert "".join(texts) == text.removeprefix("hello")
    assert not any(REPLACEMENT in piece for piece in texts)


@pytest.mark.parametrize("name", ["sentencepiece", "sentencepiece of transformers"])
def test_a_bad_byte_does_not_spoil_the_characters_around_it(name: str) -> None:
    """transformers' byte fallback would turn the whole run of bytes into U+FFFD, characters shown long ago as well."""
    tokenizer = SHARED[name]()
    characters = tokenizer.encode_plain("a你好")
    ids = [*characters, 3 + 0xE4, *tokenizer.encode_plain("a你好")[1:], 3 + 0xFF]
    assert "".join(_stream(tokenizer, tokenizer.encode("x"), ids)) == " a你好\ufffd你好\ufffd"


@pytest.mark.parametrize("name", ["sentencepiece", "sentencepiece of transformers"])
def test_a_prompt_that_ends_in_a_long_run_of_byte_tokens(name: str) -> None:
    tokenizer = SHARED[name]()
    ids = tokenizer.encode("你好" * 40)
    for num_cut in range(3):  # the context begins at any byte of a character
        prompt_ids = [*ids, *tokenizer.encode_plain("a")[:num_cut]]
        assert "".join(_stream(tokenizer, prompt_ids, tokenizer.encode_plain("a好")[-3:])) == "好"


def test_special_tokens_between_spaces() -> None:
    for name in ("byte-level of transformers", "sentencepiece"):
        tokenizer = SHARED[name]()
        params = SamplingParams(skip_special_tokens=False)
        special = tokenizer._decode([1])
        ids = [*tokenizer.encode_plain("hi"), 1, 1, *tokenizer.encode_plain("yo")]
        assert "".join(_stream(tokenizer, [], ids, params)) == f"hi {special} {special} yo"


@with_every_tokenizer
@pytest.mark.parametrize("text", ["some plain text. ", "你好 😀 ", "   \n"])
def test_the_cost_of_a_token_is_constant(name: str, text: str) -> None:
    tokenizer = SHARED[name]()
    ids = (tokenizer.encode_plain(text) * 4500)[:4500]

    def seconds(num_before: int) -> float:
        def make() -> Detokenizer:
            detokenizer = Detokenizer(tokenizer, SamplingParams(stop=["END"]), tokenizer.encode("abc"))
            for token_id in ids[:num_before]:
                detokenizer.append(token_id, check_stop=True)
            return detokenizer

        detokenizers = iter([make() for _ in range(3)])

        def run() -> None:
            detokenizer = next(detokenizers)
            for token_id in ids[num_before : num_before + 500]:
                detokenizer.append(token_id, check_stop=True)

        return best_time(run, 3)

    assert seconds(4000) < 3 * seconds(0)
