"""From the arguments of a method to a prepared call: what the client sends."""
