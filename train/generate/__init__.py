"""Text from a trained model: a pool of pages for keys and values, and an engine that fills steps with whatever
sequences there are. In: parameters, requests. Out: tokens as they are made. Start at `engine.Engine`."""
