"""From a budget and the batch of an update to the configuration to run: `walk` goes from variant to variant, `space` is
what it may change, `step` one variant that was tried, `reach` the ranks and lengths that adapters go to, `result` the
JSON of all of it. Start with `walk.Walk`."""
