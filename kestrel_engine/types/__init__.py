"""The values that the rooms of the engine exchange: requests, steps, events, timings, the model's numbers. No torch."""
