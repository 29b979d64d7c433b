"""``bridge``: answers the programs of others, in their own protocols, with the results of a server."""
