"""Loading models for benchmarks, and steps and skills for them."""
