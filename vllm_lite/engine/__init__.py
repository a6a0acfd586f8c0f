"""The control plane: plain Python and numpy. Knows neither torch nor HTTP."""
