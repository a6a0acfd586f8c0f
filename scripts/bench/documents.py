"""Prompts out of a folder of documents: one text after the other, cut into chunks. Knows no server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vllm_lite.engine.tokenizer_protocol import Tokenizer

CHARS_PER_TOKEN = 4
"""What is taken for a token where there is no tokenizer to count with: about that of English text."""
BETWEEN_DOCUMENTS = "\n\n"


def read_chunks(folder: Path, *, num_chunks: int, chunk_tokens: int, tokenizer: Tokenizer | None) -> list[str]:
    """`num_chunks` pieces of `chunk_tokens` tokens, of the folder's UTF-8 files in the order of their paths.

    Tokens are those of the tokenizer, without what it adds to a prompt, or else every four characters. Reads no more
    than it needs. Raises ValueError where there is too little text.
    """
    if not folder.is_dir():
        raise ValueError(f"--documents must be a folder, got {folder}")
    size = chunk_tokens * (CHARS_PER_TOKEN if tokenizer is None else 1)
    chunks: list[str] = []
    text, token_ids = "", list[int]()
    for document in _documents(folder):
        text += document + BETWEEN_DOCUMENTS
        if tokenizer is not None:
            token_ids += tokenizer.encode_plain(text)
            text = ""
        whole = (len(text) if tokenizer is None else len(token_ids)) // size
        for start in range(0, whole * size, size):
            end = start + size
            chunks.append(text[start:end] if tokenizer is None else tokenizer.decode(token_ids[start:end]))
        text, token_ids = text[whole * size :], token_ids[whole * size :]
        if len(chunks) >= num_chunks:
            return chunks[:num_chunks]
    raise ValueError(
        f"the documents in {folder} make {len(chunks)} chunks of {chunk_tokens} tokens, and {num_chunks} are wanted: "
        "lower --num-chunks or --chunk-tokens, or add documents"
    )


def _documents(folder: Path) -> Iterator[str]:
    """Files that are not text are passed over."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
