"""`python -m vllm_lite.entrypoints.api_server`: the native `/generate` server on the engine of this package."""

from __future__ import annotations

import sys

from vllm_lite.build import build_engine
from vllm_lite.entrypoints.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], build_engine))
