"""Generates and scores text with a trained model: a paged KV cache, and an engine that batches all running sequences.

In: parameters and requests. Out: tokens, one step at a time. Start at `engine.Engine`.
"""
