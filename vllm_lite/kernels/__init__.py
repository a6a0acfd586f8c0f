"""How source becomes callable code. Knows no op and no model."""
