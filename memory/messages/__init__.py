"""Reads memory messages of JAX, XLA and PyTorch in a log, and explains the cause and what to do.

In: the text of a log from any machine. Out: an `Explanation` with sizes, largest buffers, cause and remedies, shown by
explanation_document.py. Start at `explanation.py:explain`. log_text.py finds the parts of a log
that may contain a message about memory (passages), message_readers.py reads the messages, causes.py decides the cause,
and remedies.py is the table of remedies. No module here imports jax.

To recognize one more text: (1) `KEY_PHRASES` in log_text.py contains a part of it, otherwise its lines are never read;
(2) a pattern and a `yield` in a reader of message_readers.py, and a word of the text for this reader in `READERS`; (3)
if no form says what happened, a row of `FORMS` in message_forms.py; (4) its cause in `CAUSE_OF_FORM` of causes.py,
otherwise it is "unknown"; (5) other remedies than those of its cause in `BY_FORM` of remedies.py.
"""
