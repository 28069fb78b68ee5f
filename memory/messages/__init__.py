"""Reads memory messages of JAX, XLA and PyTorch in a log, and explains the cause and what to do.

In: the text of a log from any machine. Out: an `Explanation` with sizes, largest buffers, cause and remedies, shown by
explanation_document.py. Start at `explanation.py:explain`. log_text.py finds the parts of a log
that may contain a message about memory (passages), message_readers.py reads the messages, causes.py decides the cause,
and remedies.py is the table of remedies. No module here imports jax.
"""
