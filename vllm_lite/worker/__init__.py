"""The data plane: opens checkpoints, sizes the cache, and computes steps. Knows no request and no HTTP."""
