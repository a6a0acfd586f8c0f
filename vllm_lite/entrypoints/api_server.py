"""`python -m vllm_lite.entrypoints.api_server`: the native `/generate` server on the engine of this package."""

from __future__ import annotations

import importlib
import signal
import sys
from typing import Any


def build_engine(config: Any) -> Any:
    """`vllm_lite.build.build_engine`, which loads torch only now: a wrong flag or a taken port need not wait for it."""
    return importlib.import_module("vllm_lite.build").build_engine(config)


if __name__ == "__main__":
    # Python's own handler would print a traceback out of the imports, and parts of torch's swallow the exception.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    from vllm_lite.entrypoints.launch import main
    from vllm_lite.entrypoints.native.routes import NATIVE

    sys.exit(main(sys.argv[1:], build_engine, NATIVE))
