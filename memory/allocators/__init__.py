"""Models of jax's allocators for GPUs: which allocations of a run succeed, and how much memory each allocator needs.

The input is a sequence of events, each an allocation or a free. `program_events.py` derives the events of a run from
the memory reports of its programs. `bfc.py` models jax's default allocator. `replay.py` models the allocators
`cuda_async` and `platform`, sends events to a model, and returns peak, reserved bytes, fragmentation and the request
that failed. Start at `replay.replay_all`, which replays events on every allocator of a GPU.
"""
