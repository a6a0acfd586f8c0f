"""`python -m vllm_lite.entrypoints.openai.api_server`: OpenAI's protocol on the engine of this package."""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    # Python's own handler would print a traceback out of the imports, and parts of torch's swallow the exception.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    from vllm_lite.entrypoints.api_server import build_engine
    from vllm_lite.entrypoints.launch import main
    from vllm_lite.entrypoints.openai.program import OPENAI

    sys.exit(main(sys.argv[1:], build_engine, OPENAI))
