"""Generation over pages: keys and values of many sequences in one pool. In: a transformer, tokens, where their
sequences lie. Out: the hidden state of those tokens, and the pool. Start at `paged_step.py`."""
