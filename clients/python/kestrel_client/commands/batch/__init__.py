"""``batch``: runs tasks on many images, writes a line of JSON for each, and continues where it was interrupted."""
