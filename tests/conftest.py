"""Settings of the whole suite."""

from __future__ import annotations

import os

# Several test processes share the cores, and tiny models gain nothing from a second thread. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# That of the developer's own servers: tests send none.
os.environ.pop("VLLM_LITE_API_KEY", None)
