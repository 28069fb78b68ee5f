"""Memory of generation: how many pages of keys and values fit beside the weights, and how many sequences fill them. In:
what the compiled steps take. Out: a budget, shown as text, page or JSON. Start at `budget.py`."""
