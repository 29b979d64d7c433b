"""What answers a call of the skills: the requests of the engine that it starts, and the response made of them."""
