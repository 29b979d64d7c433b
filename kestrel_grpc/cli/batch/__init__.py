"""``batch``: runs tasks on many images, writes a line of JSON for each, and goes on where it was interrupted."""
